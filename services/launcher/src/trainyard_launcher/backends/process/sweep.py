"""Finds and ends every process of an attempt, wherever it hid.

A process belongs to an attempt when it sits in one of its cgroups, has its id in the environment it was started with,
is in the session of its agent, or descends from one that does. New sessions, new process groups and ignored signals
change nothing of this.

What is found is named by pid and start time. The start time is read before whatever shows that the process belongs,
and compared again when it is killed, so a pid that another process got in between is left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainyard.proc import Process, open_process, processes, send_signal

logger = logging.getLogger(__name__)

_ATTEMPT = b"TRAINYARD_ATTEMPT_ID="
_NODE = b"TRAINYARD_NODE="
_SHELL = b"TRAINYARD_SHELL="

Members = Mapping[int, int]
"""Processes: start time by pid."""


@dataclass(frozen=True, slots=True)
class Leader:
    """The process that began a session: its pid is the session's id."""

    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class Target:
    """What to end: an attempt on this machine, or one node of it.

    Args:
        node: None for all nodes.
        agent: the agent, as it wrote down in this boot of the machine; None for unknown.
        folder: the node's folder.
        cgroups: folders of its cgroups.
    """

    attempt_id: str
    node: int | None = None
    agent: Leader | None = None
    folder: Path | None = None
    cgroups: tuple[str, ...] = ()


def end_all(target: Target, timeout_s: float) -> int:
    """Kills everything of a target and waits until it is gone; returns how many processes were killed.

    Raises:
        TimeoutError: something outlived SIGKILL for `timeout_s` (stuck in the kernel).
    """
    return end(lambda: find(target), timeout_s, f"attempt {target.attempt_id}")


def end(members: Callable[[], Members], timeout_s: float, what: str) -> int:
    """Kills what `members` finds until it finds nothing more: what is killed may be starting others meanwhile."""
    deadline = time.monotonic() + timeout_s
    killed = 0
    while found := members():
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(found)} of {what} did not die of SIGKILL within {timeout_s:.0f} s")
        killed += _kill_and_wait(found, deadline)
    return killed


def _kill_and_wait(members: Members, deadline: float) -> int:
    with contextlib.ExitStack() as open_files:
        poll = select.poll()
        waiting = set()
        for pid, start_time in members.items():
            pidfd = open_process(pid, start_time)
            if pidfd is not None:
                open_files.callback(os.close, pidfd)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                poll.register(pidfd, select.POLLIN)
                waiting.add(pidfd)
        killed = len(waiting)
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for pidfd, _ in poll.poll(left_s * 1000):
                poll.unregister(pidfd)
                waiting.discard(pidfd)
        return killed


def find(target: Target) -> Members:
    """The processes of a target, now."""
    table = _table()
    found = {pid for folder in target.cgroups for pid in _cgroup_members(Path(folder))}
    found |= _session(table, target.agent, target.folder)
    found |= {pid for pid in table if pid not in found and _belongs(_environ(pid), target)}
    return _with_descendants(found, table)


def find_shell(mark: str, leader: Leader | None) -> Members:
    """The processes of a shell.

    Args:
        mark: TRAINYARD_SHELL of its environment.
        leader: its first process; None when that had ended before it could be looked at.
    """
    table = _table()
    found = _session(table, leader, None)
    found |= {pid for pid in table if pid not in found and _SHELL + mark.encode() in _environ(pid)}
    return _with_descendants(found, table)


def hang_up(members: Members) -> None:
    """Sends SIGHUP to all of them."""
    for pid, start_time in members.items():
        send_signal(pid, start_time, signal.SIGHUP)


def attempts_alive() -> set[str]:
    """Ids of all attempts of which some process runs."""
    ids = set()
    for pid in _table():
        for variable in _environ(pid):
            if variable.startswith(_ATTEMPT):
                ids.add(variable[len(_ATTEMPT) :].decode(errors="replace"))
    return ids


def _session(table: Mapping[int, Process], leader: Leader | None, folder: Path | None) -> set[int]:
    """The processes of the session that `leader` began.

    The kernel gives nobody a pid that is still the id of a session. So while the leader is there, if only as a zombie,
    everything in the session is its own; when another process has its pid, nothing is. When the leader is gone, a
    session of that id may have been begun by a later process that had the pid, and has ended as well: then only what
    uses the node's folder belongs.
    """
    if leader is None:
        return set()
    first = table.get(leader.pid)
    if first is not None and first.start_time != leader.start_time:
        return set()
    members = {pid for pid, process in table.items() if process.session == leader.pid}
    if first is not None or not members:
        return members
    return {pid for pid in members if folder is not None and _uses(pid, folder)}


def _uses(pid: int, folder: Path) -> bool:
    """Whether a process is in a folder, or writes its output there."""
    for link in ("cwd", "fd/1", "fd/2"):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/{link}").readlink().is_relative_to(folder):
                return True
    return False


def _belongs(environ: list[bytes], target: Target) -> bool:
    if _ATTEMPT + target.attempt_id.encode() not in environ:
        return False
    return target.node is None or _NODE + str(target.node).encode() in environ


def _with_descendants(roots: set[int], table: Mapping[int, Process]) -> Members:
    """These processes and everything below them: what runs, this process left out."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found, todo = set(roots), list(roots)
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    running = (table[pid] for pid in found - {os.getpid()} if pid in table)
    return {process.pid: process.start_time for process in running if not process.ended}


def _table() -> dict[int, Process]:
    """Every process of this machine by pid."""
    return {process.pid: process for process in processes()}


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
