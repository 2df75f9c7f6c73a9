"""A run of its own: what the tracker does in a process that belongs to no job.

The process writes into a folder under the yard's home and starts a shipper, which is detached from it: shipping is
never a thread of the trainer. The shipper waits for the process to end; what it cannot deliver stays for the next one,
or the next yard.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

from trainyard.home import boot_id, home, process_start_time

RUN_FILE = "run.json"
_run_folder: Path | None = None


def folder() -> Path:
    """Where runs of plain processes are kept until they are delivered."""
    return home() / "offline"


def begin() -> Path:
    """The folder of this process's run. Its forked children write to the same run."""
    global _run_folder
    if _run_folder is None:
        run_id = str(uuid.uuid4())
        home().mkdir(parents=True, exist_ok=True, mode=0o700)
        _run_folder = folder() / run_id
        _run_folder.mkdir(parents=True, mode=0o700)
        _describe(_run_folder, run_id)
        _start_shipper(_run_folder)
    return _run_folder


def _describe(run_folder: Path, run_id: str) -> None:
    pid = os.getpid()
    context = {"argv": sys.argv, "cwd": str(Path.cwd()), "python": sys.version, "host": os.uname().nodename}
    description = {
        "id": run_id,
        "name": Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "python",
        "created_ns": time.time_ns(),
        "pid": pid,
        "start_time": process_start_time(pid),
        "boot_id": boot_id(),
        "context": context,
    }
    draft = run_folder / f"{RUN_FILE}.new"
    draft.write_text(json.dumps(description))
    draft.rename(run_folder / RUN_FILE)


def _start_shipper(run_folder: Path) -> None:
    # A session of its own: Ctrl-C in the trainer's terminal is not meant for it.
    process = subprocess.Popen(
        [sys.executable, "-m", "trainyard.agent.ship", str(run_folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    process.returncode = 0  # nobody waits for it, and it is no leak
