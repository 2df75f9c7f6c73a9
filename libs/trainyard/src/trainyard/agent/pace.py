"""How fast training goes now, and how long it will take at that."""

from __future__ import annotations

from collections import deque

WINDOW_NS = 120 * 10**9


class Pace:
    """Steps over time, within a recent window: when training slows down, the time left follows.

    Where one step takes longer than the window, the last two count.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[int, int]] = deque()  # step and time of it, both growing

    def add(self, step: int, time_ns: int) -> None:
        """Training was at `step` then. What is not beyond the newest step changes nothing.

        Time counts from the last report of the first step: what is done before training moves is no part of its pace.
        """
        if len(self._marks) == 1 and step == self._marks[0][0]:
            self._marks.clear()
        if self._marks and (step <= self._marks[-1][0] or time_ns <= self._marks[-1][1]):
            return
        self._marks.append((step, time_ns))
        while len(self._marks) > 2 and time_ns - self._marks[1][1] >= WINDOW_NS:
            self._marks.popleft()

    def seconds_left(self, total_steps: int) -> float | None:
        """Until `total_steps` are done; None while nothing can be said."""
        if not total_steps or len(self._marks) < 2:
            return None
        (first_step, first_ns), (step, time_ns) = self._marks[0], self._marks[-1]
        per_step_s = (time_ns - first_ns) / 1e9 / (step - first_step)
        return max(0, total_steps - step) * per_step_s
