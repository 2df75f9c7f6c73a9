"""Child processes in asyncio: one place that waits for all of them.

The agent adopts every orphan below it, so somebody has to reap children that nobody knows. Two callers of
`waitpid(-1)` would steal each other's; therefore the workers, git, uv and py-spy all go through the same `Reaper`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainyard.agent.spawn import Command, start
from trainyard.proc import Process, processes, send_signal

KILL_TIMEOUT_S = 10.0


class Reaper:
    """Collects the exit status of every child of this process, known or adopted.

    Attributes:
        resident_peaks: of ended children that were expected, by pid: the most resident memory, in bytes, of any one
            process among the child and the descendants that it waited for.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._reaped = asyncio.Event()
        self.resident_peaks: dict[int, int] = {}

    def begin(self) -> None:
        """Takes over SIGCHLD of the running loop, and what ended before."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        self._reap()

    def expect(self, pid: int) -> asyncio.Future[int]:
        """The exit code of a child, negative for a signal. To be called before the loop runs again after its start."""
        return self._waiting.setdefault(pid, asyncio.get_running_loop().create_future())

    def _reap(self) -> None:
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            future = self._waiting.pop(pid, None)
            if future is not None and not future.done():
                self.resident_peaks[pid] = used.ru_maxrss * 1024
                future.set_result(os.waitstatus_to_exitcode(status))
        self._reaped.set()

    async def run(self, argv: Sequence[str], *, log: Path, cwd: Path, env: dict[str, str], timeout_s: float) -> int:
        """Runs a program to its end, its output appended to `log`; returns its exit code.

        Raises:
            CannotStart: there is no such program.
            TimeoutError: it took longer than `timeout_s`; it was killed.
        """
        pid = start(Command(list(argv), env, str(cwd), str(log)))
        ended = self.expect(pid)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(ended)
        finally:
            if not ended.done():
                signal_group(pid, signal.SIGKILL)

    async def kill_descendants(self, timeout_s: float = KILL_TIMEOUT_S) -> list[int]:
        """Kills whatever is left below this process; returns what could not be killed in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while left := list(_below(os.getpid())):
                    self._reaped.clear()
                    for process in left:
                        send_signal(process.pid, process.start_time, signal.SIGKILL)
                    self._reap()
                    if list(descendants(os.getpid())):
                        self._reaped.clear()
                        await self._reaped.wait()
        except TimeoutError:
            return list(descendants(os.getpid()))
        return []


def descendants(pid: int) -> Iterator[int]:
    """Every living process below `pid`, children first. Zombies have nothing left to kill."""
    return (process.pid for process in _below(pid))


def signal_group(pid: int, number: int) -> None:
    """Sends a signal to every process of the group that a child of this process, `pid`, began.

    Not with `killpg`: a group that has ended may have left its number to processes of somebody else. Everything that a
    worker started stays below this process, which adopts orphans, so the group's processes are those found there.
    """
    told: set[tuple[int, int]] = set()
    while (
        group := {(process.pid, process.start_time) for process in _below(os.getpid()) if process.group == pid} - told
    ):  # what is told may be starting others meanwhile
        for member in group:
            send_signal(*member, number)
        told |= group


def _below(pid: int) -> Iterator[Process]:
    children: dict[int, list[Process]] = {}
    for process in processes():
        if not process.ended:
            children.setdefault(process.parent, []).append(process)
    pending = [pid]
    while pending:
        for child in children.get(pending.pop(0), ()):
            pending.append(child.pid)
            yield child
