"""Identifiers and time: ids sort by the time they were made, time is UTC nanoseconds."""

from __future__ import annotations

import secrets
import threading
import time
from uuid import UUID

_COUNTED = 1 << 12
"""Ids of one millisecond."""


class Ids:
    """Makes UUIDv7 that grow: 12 bits behind the millisecond count within it (RFC 9562, section 6.2, method 1).

    So ids that one process made differ in their first 18 characters, which are what people are shown: jobs that were
    submitted together can be told apart. When a millisecond has no number left, or the clock goes back, ids run ahead
    of the clock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tick = 0  # milliseconds since the epoch, and the count

    def next(self, now_ms: int) -> UUID:
        """The next one. The count begins at random, in its lower half, so that several processes rarely meet.

        Args:
            now_ms: milliseconds since the Unix epoch.
        """
        begun = now_ms * _COUNTED + secrets.randbelow(_COUNTED // 2)
        with self._lock:
            fresh = now_ms > self._tick // _COUNTED
            self._tick = tick = begun if fresh else self._tick + 1
        milliseconds, count = divmod(tick, _COUNTED)
        return UUID(int=milliseconds << 80 | 0x7 << 76 | count << 64 | 0b10 << 62 | secrets.randbits(62))


_IDS = Ids()


def new_id() -> str:
    """A UUIDv7 in text form: 36 characters, unique, ordered by creation time."""
    return str(_IDS.next(time.time_ns() // 1_000_000))


def now_ns() -> int:
    """Nanoseconds since the Unix epoch, UTC."""
    return time.time_ns()
