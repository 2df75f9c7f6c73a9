"""Kombu's transport for messages within one process, with a bell instead of a clock.

The one that ships with Kombu looks for messages every so many milliseconds; here whoever puts a message, or makes room
for the next one by acknowledging, wakes those that wait. It is also what wakes a worker that is to stop.
"""

from __future__ import annotations

import threading
from queue import Empty
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, memory

SCHEME = "inprocess"
TRANSPORT_ALIASES[SCHEME] = f"{__name__}:Transport"


class Bell:
    """Rings for everybody who waits; one that rang since `count` was read is not missed."""

    def __init__(self) -> None:
        self._rung = threading.Condition()
        self.count = 0

    def ring(self) -> None:
        """Wakes all."""
        with self._rung:
            self.count += 1
            self._rung.notify_all()

    def wait(self, seen: int, timeout_s: float | None) -> None:
        """Returns when the bell rang after `seen` was its count, or when time is up."""
        with self._rung:
            self._rung.wait_for(lambda: self.count != seen, timeout_s)


bell = Bell()


class Channel(memory.Channel):
    """Rings when a message comes, and when one more may be delivered."""

    def _put(self, queue: str, message: Any, **kwargs: Any) -> None:
        super()._put(queue, message, **kwargs)
        bell.ring()

    def basic_ack(self, *args: Any, **kwargs: Any) -> None:
        super().basic_ack(*args, **kwargs)
        bell.ring()

    def basic_reject(self, *args: Any, **kwargs: Any) -> None:
        super().basic_reject(*args, **kwargs)
        bell.ring()


class Transport(memory.Transport):
    """Delivers to the consumers of one process."""

    Channel = Channel

    def drain_events(self, connection: Any, timeout: float | None = None, **_: Any) -> None:
        """Delivers one message.

        Raises:
            TimeoutError: there was none when the bell rang, or none for `timeout` seconds.
        """
        seen = bell.count
        if not self._deliver_one():
            bell.wait(seen, timeout)
            if not self._deliver_one():
                raise TimeoutError

    def _deliver_one(self) -> bool:
        assert self.cycle is not None
        try:
            self.cycle.get(self._deliver)
        except Empty:
            return False
        return True
