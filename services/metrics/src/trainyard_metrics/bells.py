"""Wakes watchers. A bell only says that something may have changed; watchers look for themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Bells:
    """Wakes listeners by key."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[Listener]] = {}

    def ring(self, key: str) -> None:
        """Wakes whoever listens to `key`."""
        for listener in self._listeners.get(key, ()):
            listener.wake()

    @contextmanager
    def listen(self) -> Iterator[Listener]:
        """A listener, to no key yet."""
        listener = Listener(self._listeners)
        try:
            yield listener
        finally:
            listener.close()


class Listener:
    """Hears the bells it was told to, until it is closed. A bell that rings before `wait` is heard by it."""

    def __init__(self, listeners: dict[str, set[Listener]]) -> None:
        self._listeners = listeners
        self._keys: set[str] = set()
        self._event = asyncio.Event()

    def add(self, keys: Iterable[str]) -> None:
        """Listens to these keys as well."""
        for key in keys:
            self._keys.add(key)
            self._listeners.setdefault(key, set()).add(self)

    def wake(self) -> None:
        """Ends `wait`, now or when it comes."""
        self._event.set()

    async def wait(self) -> None:
        """Returns once a bell rang since the last `wait`."""
        await self._event.wait()
        self._event.clear()

    def close(self) -> None:
        """Listens no more."""
        for key in self._keys:
            self._listeners[key].discard(self)
            if not self._listeners[key]:
                del self._listeners[key]
