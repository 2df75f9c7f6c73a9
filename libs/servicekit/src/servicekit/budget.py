"""A bound on what is in memory at a time: bytes that wait, fields of requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Budget:
    """Units, such as bytes, that may be taken at a time, first come, first served. Belongs to the event loop.

    Something larger than the limit is let through alone: messages have limits of their own.

    Args:
        limit: number of units.
        on_change: called with the number of units that are taken, whenever it changes.
    """

    def __init__(self, limit: int, on_change: Callable[[int], None] = lambda taken: None) -> None:
        self._limit = limit
        self._on_change = on_change
        self._taken = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Waits until there is room, and takes it. Cancelled, it takes nothing."""
        if not self._queue and self._fits(size):
            self._change(size)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(size)
            raise

    def give_back(self, size: int) -> None:
        """Gives back units that were taken."""
        self._change(-size)
        while self._queue:
            waiting, turn = self._queue[0]
            if not turn.cancelled():
                if not self._fits(waiting):
                    return
                self._change(waiting)
                turn.set_result(None)
            self._queue.popleft()

    def _fits(self, size: int) -> bool:
        return not self._taken or self._taken + size <= self._limit

    def _change(self, size: int) -> None:
        self._taken += size
        self._on_change(self._taken)
