"""`run.bin`: what this node tells metrics of its run, kept beside the records for whoever delivers them after it."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainyard_protos.v1 import metrics_pb2

from trainyard import files
from trainyard.agent.contract import own_python
from trainyard.agent.facts import context, public_spec
from trainyard.agent.interpreter import interpreter
from trainyard.agent.plan import Plan
from trainyard.agent.prepare import Prepared

RUN_FILE = "run.bin"


def describe(plan: Plan, prepared: Prepared | None) -> metrics_pb2.Run:
    """The run of this attempt. `prepared` is None when its workers could not start."""
    run = metrics_pb2.Run(
        id=plan.attempt_id,
        workspace=plan.workspace,
        job_id=plan.job_id,
        fence=plan.fence,
        name=plan.run_name,
        created_ns=time.time_ns(),
        spec=json.dumps(public_spec(plan.spec_json)),
        context=json.dumps(_context(plan, prepared)),
    )
    if prepared is not None:
        restored = prepared.restored
        run.rewind.checkpoint = restored.version_id
        run.rewind.cut.update(restored.cut)
        run.rewind.fence = restored.fence
        if restored.elsewhere is not None:
            run.rewind.elsewhere.CopyFrom(restored.elsewhere)
    return run


def _context(plan: Plan, prepared: Prepared | None) -> dict[str, Any]:
    where = context(prepared.git, prepared.code) if prepared is not None else context()
    python_bin = prepared.python_bin if prepared is not None else ""
    path = plan.env.get("PATH") or os.environ.get("PATH", os.defpath)
    with suppress(OSError):  # the run is recorded without it
        folders = [python_bin or own_python(plan), *path.split(os.pathsep)]
        where |= interpreter(plan.command[0], folders, str(prepared.root) if prepared is not None else "")
    return where | {"argv": list(plan.command)}


def keep(folder: Path, run: metrics_pb2.Run) -> None:
    """Writes the record into a node's folder, whole or not at all.

    Raises:
        OSError: the disk is full; the record before stays.
    """
    files.replace(folder / RUN_FILE, run.SerializeToString())


def kept(folder: Path, plan: Plan) -> metrics_pb2.Run:
    """The run as the agent of a node's folder knew it.

    Raises:
        OSError: the record cannot be read.
    """
    try:
        return metrics_pb2.Run.FromString((folder / RUN_FILE).read_bytes())
    except FileNotFoundError:
        # It died before that. Workers that nothing had to be prepared for ran already, from a fresh start.
        return describe(plan, None if plan.needs_preparation else Prepared(folder / "work"))
