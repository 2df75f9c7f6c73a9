"""The control group of a run, in the hierarchy of version 2: the kernel ends all processes in it at once.

No process leaves its group by itself, whatever session, parent and environment it takes. A run has two groups: one
without processes, and below it the one that the run and its processes are in. So the launcher of a yard can make the
groups of its jobs in the upper one, which may have controllers because it has no processes.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable
from pathlib import Path

_MEMBERS = "processes"
_PATIENCE_S = 60.0


class NoGroup(Exception):
    """This process can make no control group; the message says why."""


def own() -> Path:
    """The folder of the group that this process is in.

    Raises:
        NoGroup: there is no hierarchy of version 2 here, or the group is outside of what is mounted.
    """
    mount = _mount()
    path = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].splitlines()[0]
    folder = mount / path.lstrip("/")
    if ".." in path or not folder.is_dir():
        raise NoGroup(f"the control group {path} is not below {mount}")
    return folder


def places(name: str) -> list[Path]:
    """Where the groups of a run can be, the best place first: beside this process's group, or in it; raises NoGroup."""
    here = own()
    beside = here if here == _mount() else here.parent
    return [parent / name for parent in dict.fromkeys((beside, here))]


def enter(places: Iterable[Path]) -> None:
    """Makes the groups of a run in one of the places, and enters them.

    Raises:
        NoGroup: the kernel refuses it, or cannot end the processes of a group (Linux has that since 5.14).
    """
    refused: list[str] = []
    for group in places:
        try:
            (group / _MEMBERS).mkdir(parents=True)
            (group / "cgroup.kill").stat()
            move(group / _MEMBERS)
        except OSError as error:
            refused.append(f"{error.filename}: {error.strerror}")
            remove(group)
        else:
            return
    raise NoGroup("; ".join(refused))


def move(group: Path) -> None:
    """Moves this process, not those that it has started, into a group; raises OSError."""
    descriptor = os.open(group / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, b"0")
    finally:
        os.close(descriptor)


def kill(group: Path) -> None:
    """Ends every process in a group and those below it, and returns when none is left; raises TimeoutError."""
    if not group.exists():
        return
    (group / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + _PATIENCE_S
    with (group / "cgroup.events").open() as events:
        changed = select.poll()
        changed.register(events, select.POLLPRI)
        while "populated 0" not in events.read():
            if not changed.poll(max(deadline - time.monotonic(), 0) * 1000):
                raise TimeoutError(f"processes in {group} do not end: {(group / 'cgroup.procs').read_text().split()}")
            events.seek(0)


def remove(group: Path) -> None:
    """Removes a group without processes and those below it."""
    if group.is_dir():
        for folder in sorted((item for item in group.rglob("*") if item.is_dir()), reverse=True):
            folder.rmdir()
        group.rmdir()


def _mount() -> Path:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, path, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(path)
    raise NoGroup("no control groups of version 2 are mounted")
