"""A run of its own: what the tracker does in a process that belongs to no job.

The process writes into a folder under the yard's home and starts a shipper, which is detached from it: shipping is
never a thread of the trainer. The shipper waits for the run's owner and its writers to end; what it cannot deliver
stays for the next one, or the next yard.

A run belongs to the process that began it, which may have several, one after the other. Under torchrun it belongs to
torchrun: the processes that one torchrun started make one run together, each with its rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from trainyard.home import boot_id, home, process_start_time

RUN_FILE = "run.json"
FINISHED_FILE = "finished"
"""In a run's folder: its owner lives, and writes to another run now."""
# Nice before its imports, which would otherwise take the processor from the first steps of the training. Where Linux
# groups processes by session, it compares the niceness of the sessions first.
_SHIPPER = """
import contextlib, os, runpy
os.nice(10)
with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
    group.write("10")
runpy.run_module("trainyard.agent.ship", run_name="__main__")
"""
_run_folder: Path | None = None
_name = ""
_number = 0  # how many runs this process has had before


class _Owner(NamedTuple):
    """The process that a run belongs to."""

    pid: int
    start_time: int
    run_id: str


def folder() -> Path:
    """Where runs of plain processes are kept until they are delivered."""
    return home() / "offline"


def call_run(name: str) -> None:
    """Gives the run a name, where it has none yet.

    Raises:
        ValueError: the run has begun, and so it has a name.
    """
    global _name
    if _run_folder is not None and name != _name:
        raise ValueError(
            f"the run has begun and cannot be called '{name}' any more: call init() before anything else, or finish() "
            "for another run"
        )
    _name = name


def begin() -> Path:
    """The folder of this process's run. Its forked children write to the same run."""
    global _run_folder
    if _run_folder is None:
        owner = _owner()
        home().mkdir(parents=True, exist_ok=True, mode=0o700)
        run_folder = folder() / owner.run_id
        run_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            described = _describe(run_folder, owner)
        except OSError:  # the disk is full: the next try makes a folder of its own
            with contextlib.suppress(OSError):
                run_folder.rmdir()  # unless another process of the run has written to it
            raise
        if described:
            _start_shipper(run_folder)
        _run_folder = run_folder
    return _run_folder


def leave() -> None:
    """What is recorded from now on makes another run. Forked children stay in theirs."""
    global _run_folder, _name, _number
    left, _run_folder, _name = _run_folder, None, ""
    _number += 1  # also of a run to which this process wrote nothing: another rank may have
    if left is None:
        return
    if json.loads((left / RUN_FILE).read_bytes())["pid"] == os.getpid():
        (left / FINISHED_FILE).touch()


def _owner() -> _Owner:
    launch = os.environ.get("TORCHELASTIC_RUN_ID")
    pid = os.getppid() if launch else os.getpid()
    start_time = process_start_time(pid) or 0
    if not launch:
        return _Owner(pid, start_time, str(uuid.uuid4()))
    which = f" {_number}" if _number else ""  # all ranks begin their runs in the same order
    name = f"{launch} {boot_id()} {pid} {start_time}{which}"
    return _Owner(pid, start_time, str(uuid.uuid5(uuid.NAMESPACE_OID, name)))


def _describe(run_folder: Path, owner: _Owner) -> bool:
    """Says what the run is; False when another of its processes has."""
    context = {"argv": sys.argv, "cwd": str(Path.cwd()), "python": sys.version, "host": os.uname().nodename}
    description = {
        "id": owner.run_id,
        "name": _name or (Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "python"),
        "created_ns": time.time_ns(),
        "pid": owner.pid,
        "start_time": owner.start_time,
        "boot_id": boot_id(),
        "context": context,
    }
    draft = run_folder / f"{RUN_FILE}.{os.getpid()}"
    try:
        draft.write_text(json.dumps(description))
        os.link(draft, run_folder / RUN_FILE)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def _start_shipper(run_folder: Path) -> None:
    """In a session of its own: Ctrl-C in the trainer's terminal is not meant for it. It gives way to the trainer.

    Nobody waits for it. `subprocess` would take milliseconds to import, in the middle of a training step.
    """
    nowhere = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in range(3)]
    others = [(os.POSIX_SPAWN_CLOSE, int(each.name)) for each in Path("/proc/self/fd").iterdir() if int(each.name) > 2]
    command = [sys.executable, "-c", _SHIPPER, str(run_folder)]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=[*nowhere, *others], setsid=True)
