"""Who waits for events. The newest ones are kept here for those that keep up; who is behind reads the table."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile

from trainyard_scheduler.tables import Event

EVERYTHING = ""
_KEPT = 1000


class EventHub:
    """Wakes the watchers of an object, and those of everything."""

    def __init__(self) -> None:
        self.newest_seq = 0
        self.closed = False
        self._newest: deque[Event] = deque()
        self._forgotten_seq = 0
        self._watchers: dict[str, set[asyncio.Event]] = {}

    def open(self, newest_seq: int) -> None:
        """Events up to this number are in the table alone."""
        self.newest_seq = self._forgotten_seq = newest_seq

    @contextmanager
    def subscribe(self, object_id: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever something happened to the object (EVERYTHING: to any)."""
        wake = asyncio.Event()
        watchers = self._watchers.setdefault(object_id, set())
        watchers.add(wake)
        try:
            yield wake
        finally:
            watchers.discard(wake)
            if not watchers and self._watchers.get(object_id) is watchers:
                del self._watchers[object_id]

    def publish(self, events: Iterable[Event]) -> None:
        """Called after the commit of these events, in the order of commits."""
        for event in events:
            self.newest_seq = event.seq
            self._newest.append(event)
            self._wake(event.object_id)
        while len(self._newest) > _KEPT:
            self._forgotten_seq = self._newest.popleft().seq
        self._wake(EVERYTHING)

    def after(self, seq: int) -> list[Event] | None:
        """All events after a number, the oldest first; None when only the table has them all."""
        if seq < self._forgotten_seq:
            return None
        return list(takewhile(lambda event: event.seq > seq, reversed(self._newest)))[::-1]

    def close(self) -> None:
        """Wakes everybody for the last time."""
        self.closed = True
        for object_id in list(self._watchers):
            self._wake(object_id)

    def _wake(self, object_id: str) -> None:
        for wake in self._watchers.get(object_id, ()):
            wake.set()
