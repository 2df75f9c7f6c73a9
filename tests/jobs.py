"""Small jobs, and what is asked of them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from trainyard.client import JobHandle
from trainyard_protos.v1 import scheduler_pb2

from scripts.testbed.patience import PATIENCE_S
from tests.conftest import wait_until

WAIT_S = PATIENCE_S
"""For one job to end."""


def document(command: Sequence[str], name: str = "probe", **spec: object) -> dict[str, object]:
    """A job as a mapping; it asks for little, so that many run at once."""
    fields = {"command": list(command), "resources": {"cpu": "500m", "memory": "256Mi"}} | spec
    metadata = {name: fields.pop(name, {}) for name in ("labels", "annotations")}
    return {
        "apiVersion": "trainyard.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name} | metadata,
        "spec": fields,
    }


def python(code: str, *arguments: str) -> list[str]:
    """The command that runs a few lines of Python."""
    return ["python", "-c", textwrap.dedent(code), *arguments]


def output(job: JobHandle, *ranks: int) -> list[str]:
    """What the workers wrote."""
    return [line.line.text for line in job.logs(ranks=ranks) if line.line.stream == "output"]


def running(job: JobHandle) -> None:
    """Waits until its workers run."""
    wait_until(lambda: job.status().state == scheduler_pb2.JOB_STATE_RUNNING, f"{job.name} to run")


def reasons(job: JobHandle) -> list[str]:
    """Why each attempt ended."""
    return [attempt.exit.reason for attempt in job.status().attempts]
