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

from trainkit.errors import InvalidSetup
from trainkit.trackers.base import Outcome, RunContext, Tracker
from trainkit.trackers.clock import Clock
from trainkit.trackers.values import Values, copied

_log = logging.getLogger("trainkit")


@dataclass(slots=True)
class _Lost:
    """Rows that one tracker did not take."""

    rows: int
    first: int
    last: int


class Trackers:
    """What rows are given to. Nothing is open before `open`, and on all processes but the first.

    Attributes:
        resumed_time: where rows end that are in the checkpoint resumed from, if it says so.
    """

    def __init__(self) -> None:
        self._open: list[Tracker] = []
        self._clock: Clock | None = None
        self.resumed_time: float | None = None
        self._early: list[tuple[Values, int]] = []  # logged before `open`
        self._ended = self._said_ended = False
        self._lost: dict[int, _Lost] = {}  # by the tracker's place in `_open`
        self._unflushed: set[int] = set()
        self._without_progress: set[int] = set()

    def open(self, trackers: Iterable[Tracker], context: RunContext) -> None:
        """Opens all of them. On processes but the first there are none.

        Raises:
            InvalidSetup: two of them store to the same place.
            Exception: one could not be; those before it stay open until `close`.
        """
        self._clock = context.clock
        for tracker in trackers:
            tracker.open(context)
            self._open.append(tracker)
        self._refuse_shared()
        early, self._early = self._early, []
        for values, step in early:
            self.log(values, step)

    def _refuse_shared(self) -> None:
        places: dict[str, Tracker] = {}
        for tracker in self._open:
            if (place := tracker.destination) is None:
                continue
            if place in places:
                raise InvalidSetup(
                    f"{_name(places[place])} and {_name(tracker)} both store to {place}, where each would replace or "
                    "repeat the rows of the other: leave one out, or give it another place"
                )
            places[place] = tracker

    def log(self, values: Mapping[str, float | Tensor], step: int) -> None:
        """Gives a copy of a row to each."""
        if not self._open:
            return self._log_closed(values, step)
        values = copied(values)
        for at, tracker in enumerate(self._open):
            try:
                tracker.log(values, step)
            except Exception as error:
                self._lose(at, step, error)

    def _log_closed(self, values: Mapping[str, float | Tensor], step: int) -> None:
        if self._clock is None:
            self._early.append((copied(values), step))
        elif self._ended and not self._said_ended:
            self._said_ended = True
            _log.warning(
                "%s of step %d was logged after the end of the run, when its trackers are closed, and is lost: log "
                "it in on_fit_end at the latest. This is said once.",
                ", ".join(values),
                step,
            )

    def resumed(self, time: float | None) -> None:
        """Takes in that the run resumed from a checkpoint whose rows end at `time`: what was logged before that, in
        `on_fit_start`, is among them."""
        self.resumed_time = time
        self._early.clear()

    def cut(self) -> float | None:
        """Where rows end that are in a checkpoint taken now: a time after those so far and before all others. Without
        open trackers that is where it was."""
        return self._clock.cut() if self._open and self._clock is not None else self.resumed_time

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
        self._ended = bool(self._open)
        self._early.clear()
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
