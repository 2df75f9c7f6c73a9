"""What is recorded of a run beside numbers."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Mapping
from typing import Any

from trainyard_protos.v1 import metrics_pb2

from trainyard.agent import surroundings


def context(git: Mapping[str, Any] | None = None, code: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Where a run happens, and what code it is made of: what git knows of it, and the artifact that has it."""
    where = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "memlock": surroundings.memlock() or "unlimited",
    }
    return where | ({"git": git} if git else {}) | ({"code": code} if code else {})


def public_spec(document: str) -> dict[str, Any]:
    """What a run keeps of its job's document: the spec, with the job's labels. Of `env` the names alone: what variables
    hold is for the workers."""
    job = json.loads(document or "{}")
    spec = dict(job.get("spec") or {})
    if env := spec.pop("env", None):
        spec["env"] = sorted(env)
    if labels := (job.get("metadata") or {}).get("labels"):
        spec["labels"] = labels
    return spec


def add_facts(run: metrics_pb2.Run, facts: dict[str, Any]) -> None:
    """Adds what a tracker recorded beside numbers to its run."""
    if isinstance(params := facts.get("params"), dict):
        run.params = json.dumps({**json.loads(run.params or "{}"), **params})
    if isinstance(tags := facts.get("tags"), dict):
        run.tags.update(tags)
    if isinstance(note := facts.get("note"), str):
        run.notes = f"{run.notes}\n{note}".strip()
