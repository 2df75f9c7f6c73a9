"""A tracker that writes off the training thread.

`log` copies a row into a bounded queue and wakes nobody. A thread takes what has gathered every `interval_s`, reads
tensors there, and hands the rows to `_write`. What fails is tried again with growing pauses; what finds the queue full
is dropped, and the row that comes through next is preceded by a mark: `trainkit/dropped_rows`, at the first step that
is missing.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trainkit.trackers.base import Outcome, RunContext, Tracker
from trainkit.trackers.clock import Clock
from trainkit.trackers.values import Values, copied

DROPPED = "trainkit/dropped_rows"
_LONGEST_PAUSE_S = 30.0
_AT_ONCE = 1000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """What one call of `log` recorded; `time` in seconds since 1970, by the run's clock."""

    step: int
    time: float
    values: Mapping[str, float]


class LastingError(Exception):
    """The rows will never be taken: they are dropped and marked instead of tried again."""


class Background(Tracker):
    """The base of trackers that wait for a disk or a network.

    Args:
        capacity: rows that wait at most.
        interval_s: how often they are written, in seconds.
        patience_s: the longest that `flush` and `close` wait, in seconds.
    """

    def __init__(self, *, capacity: int = 100_000, interval_s: float = 0.5, patience_s: float = 30.0) -> None:
        self._capacity, self._interval_s, self._patience_s = capacity, interval_s, patience_s
        self._thread: threading.Thread | None = None
        self._clock = Clock()
        self._begin_run()

    def _begin_run(self) -> None:
        self._waiting: deque[tuple[int, float, Values]] = deque()
        self._dropped: tuple[int, int] | None = None  # first step, count
        self._logged = self._done = 0
        self._wake, self._written = threading.Event(), threading.Condition()
        self._outcome: Outcome | None = None
        self._deadline = 0.0

    @abstractmethod
    def _open(self, context: RunContext) -> None:
        """As `open`, on the training thread."""

    @abstractmethod
    def _write(self, rows: Sequence[Row]) -> None:
        """Stores rows so that they survive a kill of this process. Called on the writing thread alone.

        Raises:
            LastingError: they will never be taken.
            Exception: not now; called again later with the same rows.
        """

    @abstractmethod
    def _close(self, outcome: Outcome) -> None:
        """Ends the run where rows went. Called once, on the writing thread, after the last row."""

    def open(self, context: RunContext) -> None:
        self._begin_run()  # a trainer may run several times
        self._clock = context.clock
        self._open(context)
        self._thread = threading.Thread(target=self._run, name=f"trainkit-{type(self).__name__}", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float | Tensor], step: int) -> None:
        if len(self._waiting) >= self._capacity:
            first, count = self._dropped or (step, 0)
            self._dropped = (first, count + 1)
            return
        self._mark_dropped()
        self._put(copied(values), step)

    def _mark_dropped(self) -> None:
        if self._dropped is not None:
            (first, count), self._dropped = self._dropped, None
            self._put(Values({DROPPED: float(count)}), first)

    def _put(self, values: Values, step: int) -> None:
        self._waiting.append((step, self._clock.now(), values))
        self._logged += 1

    def flush(self) -> None:
        wanted, deadline = self._logged, time.monotonic() + self._patience_s
        with self._written:
            while self._done < wanted and self._thread is not None and self._thread.is_alive():
                if time.monotonic() > deadline:
                    log.warning("%s: %d rows are not stored yet", type(self).__name__, wanted - self._done)
                    return
                self._wake.set()
                self._written.wait(0.1)

    def close(self, outcome: Outcome) -> None:
        if self._thread is None:
            return
        self._mark_dropped()
        self._deadline, self._outcome = time.monotonic() + self._patience_s, outcome
        self._wake.set()
        self._thread.join(self._patience_s)
        if self._done < self._logged:
            log.warning("%s: %d rows were not stored", type(self).__name__, self._logged - self._done)
        self._thread = None

    def _run(self) -> None:
        rows: list[Row] = []
        pause = self._interval_s
        while True:
            outcome = self._outcome  # read before taking, so that what was logged before `close` is written
            rows = rows or self._take()
            if rows and self._try(rows):
                rows, pause = [], self._interval_s
                continue
            if outcome is not None and (not rows or time.monotonic() > self._deadline):
                return self._end(outcome)
            if rows:
                pause = min(max(2 * pause, 0.1), _LONGEST_PAUSE_S)
            self._wake.wait(pause)
            self._wake.clear()

    def _take(self) -> list[Row]:
        taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), _AT_ONCE))]
        return [Row(step, at, self._numbers(values, step)) for step, at, values in taken]

    def _numbers(self, values: Values, step: int) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for name, value in values.items():
            try:
                values.wait()
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                log.warning("%s: %s of step %d is no number: %s", type(self).__name__, name, step, error)
        return numbers

    def _try(self, rows: list[Row]) -> bool:
        try:
            self._write(rows)
        except LastingError as error:
            log.warning("%s: %d rows from step %d are dropped: %s", type(self).__name__, len(rows), rows[0].step, error)
        except Exception as error:
            log.warning("%s: rows wait, because they could not be written: %s", type(self).__name__, error)
            return False
        with self._written:
            self._done += len(rows)
            self._written.notify_all()
        return True

    def _end(self, outcome: Outcome) -> None:
        try:
            self._close(outcome)
        except Exception as error:
            log.warning("%s: the run could not be ended: %s", type(self).__name__, error)
