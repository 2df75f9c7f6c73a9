"""The workers of this node, as one: they run together and end together."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from trainyard.agent.processes import Reaper, signal_group
from trainyard.agent.spawn import Started


@dataclass(frozen=True, slots=True)
class End:
    """How a worker ended."""

    rank: int
    local_rank: int
    exit_code: int | None  # None when a signal ended it
    signal: str  # name of the signal, or ""
    time_ns: int

    @property
    def failed(self) -> bool:
        return self.exit_code != 0


class Gang:
    """Started workers, and how they end.

    Attributes:
        ends: the ends so far, in the order they happened.
        failed: done when the first worker failed; never, when none does.
        over: done when all have ended.
    """

    def __init__(self, started: Sequence[Started], reaper: Reaper) -> None:
        loop = asyncio.get_running_loop()
        self.started = tuple(started)
        self._reaper = reaper
        self.ends: dict[int, End] = {}
        self.failed: asyncio.Future[End] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        for each in self.started:
            ended = reaper.expect(each.pid)
            ended.add_done_callback(lambda code, each=each: self._ended(each, code.result()))  # type: ignore[misc]
        if not self.started:
            self.over.set_result(None)

    def _ended(self, started: Started, code: int) -> None:
        rank, local_rank = started.worker.rank, started.worker.local_rank
        name = signal.Signals(-code).name if code < 0 else ""
        end = self.ends[rank] = End(rank, local_rank, None if name else code, name, time.time_ns())
        if end.failed and not self.failed.done():
            self.failed.set_result(end)
        if len(self.ends) == len(self.started):
            self.over.set_result(None)

    @property
    def running(self) -> list[Started]:
        return [each for each in self.started if each.worker.rank not in self.ends]

    @property
    def resident_peak(self) -> int:
        """Resident memory, in bytes, of the workers that ended, each at its own peak."""
        return sum(self._reaper.resident_peaks.get(each.pid, 0) for each in self.started)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to all, SIGKILL to those that are still there after `grace_s`; returns when all ended."""
        self._signal(signal.SIGTERM)
        await asyncio.wait([self.over], timeout=grace_s)
        self._signal(signal.SIGKILL)
        await asyncio.shield(self.over)

    def _signal(self, number: int) -> None:
        for each in self.running:
            signal_group(each.pid, number)
