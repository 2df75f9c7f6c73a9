"""The journal of a run: what has to be cleaned up when the run is killed. One JSON object a line, only appended to.

Its first line names the process that leads the run. The reaper holds a lock on the journal, which the kernel releases
when the reaper ends. So a journal without a lock whose leader has ended is one that no process takes care of any more.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainyard.home import process_start_time
from trainyard.proc import process_of


@dataclass
class Journal:
    """The content of a journal.

    Args:
        groups: where the control group of the run is, or would have been.
        commands: what has to be run, the oldest first.
    """

    groups: list[Path] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)


def create(path: Path) -> None:
    """Creates the journal of a run that this process leads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    draft.touch(mode=0o600)
    _append(draft, {"leader": os.getpid(), "start_time": process_start_time(os.getpid())})
    draft.rename(path)


def note_group(path: Path, group: Path) -> None:
    """Adds a place for the control group of the run."""
    _append(path, {"group": str(group)})


def note_command(path: Path, key: str, command: Sequence[str]) -> None:
    """Adds a command, which has to succeed when there is nothing left for it to do."""
    _append(path, {"key": key, "command": list(command)})


def note_done(path: Path, key: str) -> None:
    """Takes a command back: the run has done itself what it was for."""
    _append(path, {"done": key})


def read(path: Path) -> Journal:
    """Reads a journal; a line that was cut short by the end of its writer counts as not written."""
    found, commands = Journal(), {}
    for entry in _entries(path):
        if "group" in entry:
            found.groups.append(Path(entry["group"]))
        elif "command" in entry:
            commands[entry["key"]] = entry["command"]
        elif "done" in entry:
            commands.pop(entry["done"], None)
    found.commands = list(commands.values())
    return found


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds the lock on a journal.

    Args:
        path: of the journal.
        wait: whether to wait while another process has the lock.

    Yields:
        False when another process has the lock, or has removed the journal.
    """
    with ExitStack() as held:
        try:
            file = held.enter_context(path.open())
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (FileNotFoundError, BlockingIOError):
            yield False
        else:
            yield path.exists()


def abandoned(folder: Path) -> Iterator[Path]:
    """The journals in a folder that no process takes care of; each is locked while the caller looks at it."""
    for path in sorted(folder.glob("*.jsonl")):
        with locked(path, wait=False) as alone:
            if alone and not _is_led(path):
                yield path


def _is_led(path: Path) -> bool:
    first = next(_entries(path), {})
    if "leader" not in first:
        return True  # of another form: not ours to judge
    process = process_of(first["leader"])
    return process is not None and not process.ended and process.start_time == first["start_time"]


def _append(path: Path, entry: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(descriptor, f"{json.dumps(entry)}\n".encode())
    finally:
        os.close(descriptor)


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)
