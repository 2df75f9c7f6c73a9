"""Who waits for events. Notifications only wake a reader; what it reads comes from the table, at its own pace."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from trainyard_scheduler.tables import Event

EVERYTHING = ""


class EventHub:
    """Wakes the watchers of an object, and those of everything."""

    def __init__(self) -> None:
        self.newest_seq = 0
        self.closed = False
        self._watchers: dict[str, set[asyncio.Event]] = {}

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
        """Called after the commit of these events."""
        for event in events:
            self.newest_seq = max(self.newest_seq, event.seq)
            self._wake(event.object_id)
        self._wake(EVERYTHING)

    def close(self) -> None:
        """Wakes everybody for the last time."""
        self.closed = True
        for object_id in list(self._watchers):
            self._wake(object_id)

    def _wake(self, object_id: str) -> None:
        for wake in self._watchers.get(object_id, ()):
            wake.set()
