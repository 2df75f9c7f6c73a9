"""The open trackers of a run, none of which can end it.

Numbers are for looking at, and a run may have cost days: a tracker that raises loses rows of its own. That is said once
when it begins, and at the end with how many rows it lost. The other trackers get theirs. Only a tracker that cannot be
opened ends the run, before its first step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from trainkit.trackers.base import Outcome, RunContext, Tracker

_log = logging.getLogger("trainkit")


@dataclass(slots=True)
class _Lost:
    """Rows that one tracker did not take."""

    rows: int
    first: int
    last: int


class Trackers:
    """What rows are given to. Nothing is open before `open`, and on all processes but the first."""

    def __init__(self) -> None:
        self._open: list[Tracker] = []
        self._lost: dict[int, _Lost] = {}  # by the tracker's place in `_open`
        self._unflushed: set[int] = set()
        self._without_progress: set[int] = set()

    def open(self, trackers: Iterable[Tracker], context: RunContext) -> None:
        """Opens all of them.

        Raises:
            Exception: one could not be; those before it stay open until `close`.
        """
        for tracker in trackers:
            tracker.open(context)
            self._open.append(tracker)

    def log(self, values: Mapping[str, float | Tensor], step: int) -> None:
        """Gives a row to each."""
        for at, tracker in enumerate(self._open):
            try:
                tracker.log(values, step)
            except Exception as error:
                self._lose(at, step, error)

    def progress(self, step: int, total_steps: int | None) -> None:
        """Says how far the run is to each."""
        for at, tracker in enumerate(self._open):
            try:
                tracker.progress(step, total_steps)
            except Exception as error:
                if at not in self._without_progress:
                    self._without_progress.add(at)
                    _log.warning(
                        "%s did not take the progress of step %d. Training continues. This "
                        "is said once. The error was:",
                        _name(tracker),
                        step,
                        exc_info=error,
                    )

    def flush(self) -> None:
        """Returns when all rows so far are safe, but for those of trackers that say that theirs are not."""
        for at, tracker in enumerate(self._open):
            try:
                tracker.flush()
            except Exception as error:
                if at not in self._unflushed:
                    self._unflushed.add(at)
                    _log.warning(
                        "%s could not make its rows safe for a checkpoint, which counts nevertheless: rows before it "
                        "may be missing when the run goes on from there. This is said once. The error was:",
                        _name(tracker),
                        exc_info=error,
                    )

    def close(self, outcome: Outcome) -> None:
        """Ends all of them."""
        while self._open:
            tracker = self._open.pop()
            lost = self._lost.pop(len(self._open), None)
            self._unflushed.discard(len(self._open))
            self._without_progress.discard(len(self._open))
            try:
                tracker.close(outcome)
            except Exception as error:
                _log.warning(
                    "%s could not be closed, and its last rows may be missing. The error was:",
                    _name(tracker),
                    exc_info=error,
                )
            if lost is not None:
                _log.warning(
                    "%s lost %d row(s), of steps %d to %d: they are missing from its series",
                    _name(tracker),
                    lost.rows,
                    lost.first,
                    lost.last,
                )

    def _lose(self, at: int, step: int, error: Exception) -> None:
        lost = self._lost.get(at)
        if lost is not None:
            lost.rows, lost.last = lost.rows + 1, step
            return
        self._lost[at] = _Lost(1, step, step)
        _log.warning(
            "%s did not take its row of step %d: %s: %s. Training goes on, each further row is tried, and the end says "
            "how many were lost. Mend its log(), which must not raise; a place that can fail or be slow derives from "
            "trainkit.trackers.Background, which tries again without holding up training.",
            _name(self._open[at]),
            step,
            type(error).__name__,
            error,
            exc_info=error,
        )


def _name(tracker: Tracker) -> str:
    return f"the tracker {type(tracker).__name__}"
