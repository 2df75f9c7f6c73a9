"""The times of a run's rows, which tell the rows before a checkpoint from those after it."""

from __future__ import annotations

import time

_APART_S = 0.004
"""Between the last row before a cut and the first one after it: more than what storing times in milliseconds rounds."""


def moment_of(cut: float) -> float:
    """Returns when `Clock.cut` was called that returned this."""
    return cut - _APART_S / 2


class Clock:
    """Seconds since 1970 that never decrease over all processes of a resumed run, whatever the machine's clock does.

    Args:
        resumed_time: what `cut` returned for the checkpoint that the run resumed from.
    """

    def __init__(self, resumed_time: float | None = None) -> None:
        self._last = 0.0 if resumed_time is None else resumed_time + _APART_S / 2

    def now(self) -> float:
        """Returns the time of a row that is logged now."""
        self._last = now = max(time.time(), self._last)
        return now

    def cut(self) -> float:
        """Returns a time after all rows so far and before all later ones, also rounded to milliseconds."""
        now = self.now()
        self._last = now + _APART_S
        return now + _APART_S / 2
