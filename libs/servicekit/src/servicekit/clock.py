"""Clocks: what is shown and stored is UTC; what is waited for follows a clock that no step moves.

The wall clock is stepped by NTP, by a machine that wakes up, and by operators. A due time is stored as UTC, because it
has to mean something to the next process. Whoever waits for it works out once, when the wait begins, how much time is
left, and lets a steady clock count it.
"""

from __future__ import annotations

import time

_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux has it


class Clock:
    """The clocks of a process, in nanoseconds."""

    def __init__(self) -> None:
        self._begun_ns = self.utc_ns() - self.steady_ns()

    def utc_ns(self) -> int:
        """UTC, since the Unix epoch: for what is shown and stored."""
        return time.time_ns()

    def steady_ns(self) -> int:
        """Time that no step moves, and that passes while the machine sleeps: for durations."""
        return time.clock_gettime_ns(_BOOT)

    def awake_ns(self) -> int:
        """The same without the time in which the machine slept: for the silence of others, who may have slept too."""
        return time.monotonic_ns()

    def past_ns(self) -> int:
        """A time of UTC that has passed for certain: what stored times are compared with before anything is removed.

        A wall clock that was stepped forward makes everything old at once. So this is UTC as it would be without steps
        since the process began, or as the wall clock says when that is earlier.
        """
        return min(self.utc_ns(), self._begun_ns + self.steady_ns())


CLOCK = Clock()
"""The one of this process."""
