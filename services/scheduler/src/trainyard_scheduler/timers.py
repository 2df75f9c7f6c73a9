"""Everything that has to happen at some time: one heap, one task.

Timers are not stored: each follows from a row and is set again when the index is rebuilt. A handler checks the row, so
one that fires for something that has changed meanwhile does nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable
from enum import IntEnum

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


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


Handler = Callable[[list[str]], Awaitable[None]]
Key = tuple[TimerKind, str]


class Timers:
    """At most one timer for each kind and id.

    Args:
        clock: UTC nanoseconds.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._due_ns: dict[Key, int] = {}
        self._heap: list[tuple[int, Key]] = []
        self._earlier = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def set(self, kind: TimerKind, key: str, due_ns: int) -> None:
        """Sets a timer, or moves it."""
        self._due_ns[kind, key] = due_ns
        heapq.heappush(self._heap, (due_ns, (kind, key)))
        if self._heap[0][1] == (kind, key):
            self._earlier.set()
        if len(self._heap) > 64 + 2 * len(self._due_ns):
            self._heap = [(due, name) for name, due in self._due_ns.items()]
            heapq.heapify(self._heap)

    def due_ns(self, kind: TimerKind, key: str) -> int | None:
        """When a timer is due, or None when it is not set."""
        return self._due_ns.get((kind, key))

    def cancel(self, kind: TimerKind, key: str) -> None:
        """Forgets a timer, if it is set."""
        self._due_ns.pop((kind, key), None)

    def pop_due(self) -> dict[TimerKind, list[str]]:
        """Takes all timers that are due."""
        now = self._clock()
        due: dict[TimerKind, list[str]] = {}
        while self._heap and self._heap[0][0] <= now:
            when, key = heapq.heappop(self._heap)
            if self._due_ns.get(key) == when:
                del self._due_ns[key]
                due.setdefault(key[0], []).append(key[1])
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

    async def _run(self, handlers: dict[TimerKind, Handler]) -> None:
        while True:
            for kind, keys in self.pop_due().items():
                await self._fire(kind, keys, handlers[kind])
            self._earlier.clear()
            await self._sleep_until_next()

    async def _fire(self, kind: TimerKind, keys: list[str], handler: Handler) -> None:
        try:
            await handler(keys)
        except Exception:
            # The database is away: what is due stays due.
            logger.exception("a timer failed, trying again", extra={"timer": kind.name})
            for key in keys:
                self.set(kind, key, self._clock() + int(_RETRY_S * 1e9))

    async def _sleep_until_next(self) -> None:
        timeout = None
        if self._heap:
            timeout = max(0.0, (self._heap[0][0] - self._clock()) / 1e9)
        try:
            async with asyncio.timeout(timeout):
                await self._earlier.wait()
        except TimeoutError:
            pass
