"""How often something may be done: a few times at once, and once in a while for ever."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Allowance:
    """A token bucket that is full at first.

    Args:
        most: times at once.
        per_s: times a second, on average.
    """

    most: float = 10
    per_s: float = 1
    _left: float = -1
    _since: float = 0

    def take(self, now: float) -> bool:
        """Whether it may be done at this second of a clock that only grows; counts it when it may."""
        known = self.most if self._left < 0 else self._left
        left = min(self.most, known + (now - self._since) * self.per_s)
        allowed = left >= 1
        self._left, self._since = left - allowed, now
        return allowed
