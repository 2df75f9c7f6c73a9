"""Finds and ends every process of an attempt, wherever it hid.

A process belongs to an attempt when it sits in one of its cgroups, has its id in the environment it was started with,
is in the session of its agent, or descends from one that does. New sessions, new process groups and ignored signals
change nothing of this.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_ATTEMPT = b"TRAINYARD_ATTEMPT_ID="
_NODE = b"TRAINYARD_NODE="


@dataclass(frozen=True, slots=True)
class Target:
    """What to end: an attempt on this machine, or one node of it.

    Args:
        node: None for all nodes.
        session: session of the agent, only while its pid cannot have been reused; 0 for unknown.
        cgroups: folders of its cgroups.
    """

    attempt_id: str
    node: int | None = None
    session: int = 0
    cgroups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    session: int


def end_all(target: Target, timeout_s: float) -> int:
    """Kills everything of a target and waits until it is gone; returns how many processes were killed.

    Raises:
        TimeoutError: something outlived SIGKILL for `timeout_s` (stuck in the kernel).
    """
    return end(lambda: find(target), timeout_s, f"attempt {target.attempt_id}")


def end(members: Callable[[], set[int]], timeout_s: float, what: str) -> int:
    """Kills what `members` finds until it finds nothing more: what is killed may be starting others meanwhile."""
    deadline = time.monotonic() + timeout_s
    killed = 0
    while found := members():
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(found)} of {what} did not die of SIGKILL within {timeout_s:.0f} s")
        killed += _kill_and_wait(found, deadline)
    return killed


def _kill_and_wait(pids: Iterable[int], deadline: float) -> int:
    with contextlib.ExitStack() as open_files:
        poll = select.poll()
        waiting = set()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                open_files.callback(os.close, pidfd)
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                poll.register(pidfd, select.POLLIN)
                waiting.add(pidfd)
        killed = len(waiting)
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for pidfd, _ in poll.poll(left_s * 1000):
                poll.unregister(pidfd)
                waiting.discard(pidfd)
        return killed


def find(target: Target) -> set[int]:
    """Pids of a target, now."""
    processes = _table()
    found = {pid for folder in target.cgroups for pid in _cgroup_members(Path(folder))}
    found |= {pid for pid, process in processes.items() if target.session and process.session == target.session}
    found |= {pid for pid in processes if pid not in found and _belongs(_environ(pid), target)}
    return (_with_descendants(found, processes) & processes.keys()) - {os.getpid()}


def attempts_alive() -> set[str]:
    """Ids of all attempts of which some process runs."""
    ids = set()
    for pid in _table():
        for variable in _environ(pid):
            if variable.startswith(_ATTEMPT):
                ids.add(variable[len(_ATTEMPT) :].decode(errors="replace"))
    return ids


def session_members(session: int) -> set[int]:
    """Pids of the processes of a session."""
    return {pid for pid, process in _table().items() if process.session == session}


def _belongs(environ: list[bytes], target: Target) -> bool:
    if _ATTEMPT + target.attempt_id.encode() not in environ:
        return False
    return target.node is None or _NODE + str(target.node).encode() in environ


def _with_descendants(roots: set[int], processes: dict[int, _Process]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found, todo = set(roots), list(roots)
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def _table() -> dict[int, _Process]:
    """Every process of this machine that is not a zombie."""
    table = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                stat = Path(entry.path, "stat").read_text()
                state, parent, _group, session = stat[stat.rindex(")") + 2 :].split()[:4]
                if state not in "ZX":
                    table[int(entry.name)] = _Process(int(parent), int(session))
    return table


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _cgroup_members(folder: Path) -> set[int]:
    try:
        return {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}
    except OSError:
        return set()
