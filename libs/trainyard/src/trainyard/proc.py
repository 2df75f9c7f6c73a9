"""Processes of this machine as /proc shows them, and signals to them.

A pid alone is reused, so a process is named by pid and start time. A signal goes through a pidfd, which refers to one
process for good: it is opened first, the start time is compared after that, and only then is the signal sent.

The standard library alone: the agent and every command use this.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import NamedTuple

from trainyard.home import process_start_time


class Process(NamedTuple):
    """A process when it was looked at."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    start_time: int
    """In clock ticks since boot."""

    @property
    def ended(self) -> bool:
        """Whether only its exit status is left (a zombie). Its pid is not reused before its parent has read that."""
        return self.state in "ZX"


def processes() -> Iterator[Process]:
    """Every process of this machine, zombies included."""
    for name in os.listdir("/proc"):  # noqa: PTH208 (names alone; a Path for each would cost more than the rest)
        if name.isdecimal() and (process := process_of(int(name))) is not None:
            yield process


def process_of(pid: int) -> Process | None:
    """The process that has this pid now, zombie or not; None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The command, in parentheses, may itself hold spaces and parentheses.
    fields = stat[stat.rindex(b")") + 2 :].split(maxsplit=20)
    return Process(pid, fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def open_process(pid: int, start_time: int) -> int | None:
    """A pidfd of the process that has this pid and start time; None when it has ended. The caller closes it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # Another process could have got the pid before the descriptor was opened; it cannot after that.
    if process_start_time(pid) == start_time:
        return descriptor
    os.close(descriptor)
    return None


def send_signal(pid: int, start_time: int, number: int) -> bool:
    """Sends a signal to the process that has this pid and start time, never to one that got the pid later.

    Returns:
        Whether it was sent: false when the process has ended, or belongs to another user.
    """
    descriptor = open_process(pid, start_time)
    if descriptor is None:
        return False
    try:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, number)
            return True
        return False
    finally:
        os.close(descriptor)
