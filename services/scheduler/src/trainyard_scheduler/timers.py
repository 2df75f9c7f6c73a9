"""Everything that has to happen at some time: one heap, one task.

Timers are not stored: each follows from a row and is set again when the index is rebuilt. What is due at a stored time
is counted on a clock that no step moves, from the moment the timer is set. A handler is given the stored time and
compares it with the row's: a timer for something that has changed meanwhile does nothing, and one that fires is never
too early or too late by a wall clock that was stepped.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum
from typing import NamedTuple

from servicekit.clock import Clock

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_LONGEST_S = 60.0
"""The event loop's clock stands still while the machine sleeps: timers are looked at again this soon after it woke."""


class TimerKind(IntEnum):
    """What is due."""

    BACKOFF = 0
    DEADLINE = 1
    FINALIZE = 2
    RECLAIM = 3
    LEASE = 4
    EXPIRY = 5
    PROVISION = 6
    BLOCKED = 7
    AVOIDED = 8


_OF_OTHERS = frozenset({TimerKind.FINALIZE, TimerKind.RECLAIM, TimerKind.LEASE})
"""In this time a launcher has to do something. It may have slept with this machine: that time does not count."""

Handler = Callable[[Mapping[str, int]], Awaitable[None]]
"""Is given the ids that are due, each with the stored time that its timer was set for; 0 for a duration."""
Key = tuple[TimerKind, str]


class _Timer(NamedTuple):
    fires_ns: int  # of the steady clock
    due_ns: int  # as stored; 0: a duration


class Timers:
    """At most one timer for each kind and id."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: dict[Key, _Timer] = {}
        self._heap: list[tuple[int, Key]] = []
        self._earlier = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._asleep_ns = self._slept_ns()

    def at(self, kind: TimerKind, key: str, due_ns: int, now_ns: int | None = None) -> None:
        """Sets a timer for a stored time, UTC nanoseconds, or moves it. One that is set for this time stays as it is.

        Args:
            now_ns: what time it is by the clock that `due_ns` was worked out with; None: by the wall clock of now.
        """
        if self.due_ns(kind, key) != due_ns:
            now_ns = self._clock.utc_ns() if now_ns is None else now_ns
            self._set(kind, key, _Timer(self._clock.steady_ns() + due_ns - now_ns, due_ns))

    def after(self, kind: TimerKind, key: str, delay_ns: int) -> None:
        """Sets a timer for a time from now, or moves it."""
        self._set(kind, key, _Timer(self._clock.steady_ns() + delay_ns, 0))

    def fires_ns(self, kind: TimerKind, key: str) -> int | None:
        """When a timer fires, by the steady clock; None when it is not set."""
        timer = self._timers.get((kind, key))
        return timer.fires_ns if timer is not None else None

    def due_ns(self, kind: TimerKind, key: str) -> int | None:
        """The stored time that a timer is set for; None when it is not set."""
        timer = self._timers.get((kind, key))
        return timer.due_ns if timer is not None else None

    def cancel(self, kind: TimerKind, key: str) -> None:
        """Forgets a timer, if it is set."""
        self._timers.pop((kind, key), None)

    def pop_due(self) -> dict[TimerKind, dict[str, int]]:
        """Takes all timers that are due, each with its stored time."""
        self._leave_out_sleep()
        now = self._clock.steady_ns()
        due: dict[TimerKind, dict[str, int]] = {}
        while self._heap and self._heap[0][0] <= now:
            when, (kind, name) = heapq.heappop(self._heap)
            timer = self._timers.get((kind, name))
            if timer is not None and timer.fires_ns == when:
                del self._timers[kind, name]
                due.setdefault(kind, {})[name] = timer.due_ns
        return due

    def look(self) -> None:
        """Looks at the clock at once: it was moved."""
        self._earlier.set()

    def start(self, handlers: dict[TimerKind, Handler]) -> None:
        """Begins to fire."""
        self._task = asyncio.create_task(self._run(handlers), name="timers")

    async def stop(self) -> None:
        """Fires no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _set(self, kind: TimerKind, key: str, timer: _Timer) -> None:
        self._timers[kind, key] = timer
        heapq.heappush(self._heap, (timer.fires_ns, (kind, key)))
        if self._heap[0][1] == (kind, key):
            self._earlier.set()
        if len(self._heap) > 64 + 2 * len(self._timers):
            self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        self._heap = [(timer.fires_ns, key) for key, timer in self._timers.items()]
        heapq.heapify(self._heap)

    def _slept_ns(self) -> int:
        return self._clock.steady_ns() - self._clock.awake_ns()

    def _leave_out_sleep(self) -> None:
        """Moves the timers that count others' time by what the machine has slept."""
        slept_ns = self._slept_ns() - self._asleep_ns
        if slept_ns < _RETRY_S * 1e9:  # the two clocks are not read at one moment
            return
        self._asleep_ns += slept_ns
        for key, timer in self._timers.items():
            if key[0] in _OF_OTHERS:
                self._timers[key] = timer._replace(fires_ns=timer.fires_ns + slept_ns)
        self._rebuild_heap()

    async def _run(self, handlers: dict[TimerKind, Handler]) -> None:
        while True:
            for kind, due in self.pop_due().items():
                await self._fire(kind, due, handlers[kind])
            self._earlier.clear()
            await self._sleep_until_next()

    async def _fire(self, kind: TimerKind, due: Mapping[str, int], handler: Handler) -> None:
        try:
            await handler(due)
        except Exception:
            # The database is away: what is due stays due, unless it was set for another time meanwhile, as a lease is.
            logger.exception("a timer failed, trying again", extra={"timer": kind.name})
            for key, due_ns in due.items():
                if (kind, key) not in self._timers:
                    self._set(kind, key, _Timer(self._clock.steady_ns() + int(_RETRY_S * 1e9), due_ns))

    async def _sleep_until_next(self) -> None:
        timeout = None
        if self._heap:
            timeout = min(max(0.0, (self._heap[0][0] - self._clock.steady_ns()) / 1e9), _LONGEST_S)
        try:
            async with asyncio.timeout(timeout):
                await self._earlier.wait()
        except TimeoutError:
            pass
