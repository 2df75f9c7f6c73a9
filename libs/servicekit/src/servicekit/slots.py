"""A bounded number of slots for streams that hold memory or files between their messages.

A stream waits for its client after each message, and a client may stand still. So a stream that waits loses its slot
when another stream needs one, or after a while: it releases what it holds, and acquires a slot again to continue. What
all streams hold together is bounded, and no client can keep others out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_STALLED_S = 0.25
"""A client that lets its stream wait for this long stands still: another stream may have the slot."""
_TURN_S = 2.0
"""A stream that has had its slot for this long gives it to another one after its message, however fast its client is.
Less would cost more than it gives: a stream that continues opens its files again."""


class Slots:
    """Slots, first come, first served. Belongs to the event loop.

    Args:
        limit: how many streams hold a slot at a time.
        idle_s: seconds after which a stream that waits for its client loses its slot in any case.
        on_change: called with the number of slots that are held, whenever it changes.
    """

    def __init__(self, limit: int, idle_s: float, on_change: Callable[[int], None] = lambda held: None) -> None:
        self._limit = limit
        self._idle_s = idle_s
        self._on_change = on_change
        self._held = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle: set[Slot] = set()
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """A stream's slot, not acquired yet. It is given back at the end."""
        slot = Slot(self)
        try:
            yield slot
        finally:
            slot.give_up()

    async def acquire(self) -> None:
        """Waits for a slot. Cancelled, it takes none."""
        if self._held < self._limit:
            self._change(1)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._reclaim()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        """Hands a slot to the stream that has waited longest, if one waits."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._change(-1)

    def begin_idle(self, slot: Slot) -> None:
        """The stream of a slot waits for its client."""
        self._idle.add(slot)
        self._reclaim()

    def end_idle(self, slot: Slot) -> None:
        """The stream of a slot waits for its client no more."""
        self._idle.discard(slot)

    def _reclaim(self) -> None:
        """Takes slots from streams that wait for their clients, as they are due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        while self._idle:
            needed = any(not turn.done() for turn in self._waiting)
            first = min(self._idle, key=lambda slot: slot.due(needed, self._idle_s))
            due = first.due(needed, self._idle_s)
            if due > loop.time():
                self._timer = loop.call_at(due, self._reclaim)
                return
            first.give_up()

    def _change(self, by: int) -> None:
        self._held += by
        self._on_change(self._held)


class Slot:
    """The slot of one stream."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._holds = False
        self._since = self._idle_since = 0.0
        self._release: Callable[[], None] = _nothing

    async def acquire(self) -> None:
        """Waits until the stream holds a slot; at once when it still does."""
        self._slots.end_idle(self)
        if not self._holds:
            await self._slots.acquire()
            self._holds = True
            self._since = asyncio.get_running_loop().time()

    def idle(self, release: Callable[[], None]) -> None:
        """The stream waits for its client from now on: it may lose its slot until it acquires it again.

        Args:
            release: releases what the stream holds; called in the event loop when it loses its slot.
        """
        self._idle_since = asyncio.get_running_loop().time()
        self._release = release
        self._slots.begin_idle(self)

    def due(self, needed: bool, idle_s: float) -> float:
        """When an idle stream loses its slot, in time of the event loop."""
        if not needed:
            return self._idle_since + idle_s
        return max(self._idle_since, min(self._idle_since + _STALLED_S, self._since + _TURN_S))

    def give_up(self) -> None:
        """Releases what the stream holds, and gives its slot back."""
        self._slots.end_idle(self)
        release, self._release = self._release, _nothing
        release()
        if self._holds:
            self._holds = False
            self._slots.give_back()


def _nothing() -> None:
    pass
