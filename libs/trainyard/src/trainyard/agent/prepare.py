"""What has to be in place before the workers start: code, environment, inputs, the checkpoint to go on from."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainyard import copies
from trainyard.agent.checkpoints import Note
from trainyard.agent.confinement import OutsideJob, resolve_inside
from trainyard.agent.failure import NodeFailed
from trainyard.agent.plan import Plan
from trainyard.agent.processes import Reaper
from trainyard.agent.restore import FRESH, Restored
from trainyard.agent.store import Refused, Store

LOG_FILE = "prepare.log"


@dataclass(slots=True)
class Prepared:
    """Where and from what the workers start."""

    root: Path
    python_bin: str = ""
    restored: Restored = FRESH
    made_from: list[str] = field(default_factory=list)  # ids of artifact versions
    code: dict[str, str] = field(default_factory=dict)  # the artifact it was unpacked from
    git: dict[str, Any] = field(default_factory=dict)  # where the code comes from
    ready_ns: int = 0  # what changed later, by the clock of the file system, was written by the job; 0: everything was


def checkpoint_folder(plan: Plan, root: Path) -> Path | None:
    """Where the job's checkpoints are, made if need be; None when it has none."""
    if plan.checkpoints is None:
        return None
    folder = root / plan.checkpoints.path
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def prepare(plan: Plan, folder: Path, store: Store, reaper: Reaper, note: Note) -> Prepared:
    """Fetches and builds what the plan asks for.

    Raises:
        NodeFailed: something cannot be had.
    """
    from trainyard.agent.code import fetch_code
    from trainyard.agent.transfers import fetch_inputs

    log = folder / LOG_FILE
    code = await fetch_code(plan, folder / "work", store, reaper, log, note)
    root = code.root
    made_from = [code.version_id] if code.version_id else []
    prepared = Prepared(root, made_from=made_from, code=code.artifact, git=code.git)
    if plan.requirements:
        from trainyard.agent.environment import base_of, python_bin

        cache = Path(plan.state_dir or folder) / "envs"
        prepared.python_bin = str(await python_bin(plan.requirements, base_of(plan), root, cache, reaper, log, note))
    prepared.made_from += await fetch_inputs(plan.inputs, root, store)
    if plan.checkpoints is not None:
        try:
            resolve_inside(root, plan.checkpoints.path)
        except OutsideJob as error:
            raise NodeFailed("CodeUnavailable", f"checkpoints.path: {error}") from error
    checkpoints = checkpoint_folder(plan, root)
    prepared.ready_ns = _now_on_disk(root)
    _record_inputs(plan, folder, prepared)
    if checkpoints is not None:
        prepared.restored = await _restore(plan, checkpoints, store, note)
    return prepared


def _record_inputs(plan: Plan, folder: Path, prepared: Prepared) -> None:
    try:
        for each in plan.inputs:
            copies.record_input(folder, prepared.root / each.path, prepared.ready_ns)
    except OSError as error:
        print(f"inputs are not recorded as copies: {error}", flush=True)  # noqa: T201 (the agent's log)


def _now_on_disk(folder: Path) -> int:
    """Returns the current time of the clock that stamps the files around `folder`. Needs no space on a full disk."""
    os.utime(folder)
    return folder.stat().st_ctime_ns


async def _restore(plan: Plan, folder: Path, store: Store, note: Note) -> Restored:
    from trainyard.agent.restore import restore

    if plan.fence <= 1:
        return FRESH  # nothing came before the first attempt
    try:
        return await restore(plan, folder, store, note)
    except Refused as error:
        raise NodeFailed("InputUnavailable", f"checkpoints cannot be read: {error}") from error
