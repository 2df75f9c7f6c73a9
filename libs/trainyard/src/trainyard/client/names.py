"""Names that the agent, this library and the command line agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainyard_protos.v1 import scheduler_pb2

SYSTEM_PREFIX = "system/"
"""Series that the agent samples; all others are the script's own."""
BEST = "best"
"""Alias of the best checkpoint of a job that names a metric for it."""
DIFF_FILE = "diff.patch"
"""The one file of the artifact that has the diff of a job's code; `git apply` takes it."""


def job_reference(job: scheduler_pb2.Job) -> str:
    """Returns the short reference of a job, for instance "digits#7"; its id when it has no number."""
    return f"{job.name}#{job.number}" if job.number else job.id
