"""Rows for the run of a yard: inside a job the job's, in a plain script one of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainkit.extras import require
from trainkit.trackers.base import Outcome, RunContext, Tracker
from trainkit.trackers.plain import flat


class Yard(Tracker):
    """The yard's own tracker: `log` appends to a mapped file, which another process ships.

    A script that began a run itself (`trainyard.tracker.init`, or anything it recorded) keeps it: rows and parameters
    go to that run, and it stays open afterwards.

    What was logged survives a kill at once, and a job that goes on from a checkpoint hides what lies beyond it.

    Raises:
        MissingExtra: when the run begins and `trainyard` is not installed.
    """

    def __init__(self) -> None:
        self._tracker: Any = None
        self._began = False  # the run, which is then ours to end

    def open(self, context: RunContext) -> None:
        self._tracker = require("trainyard.tracker", "the yard's tracker")
        self._began = not self._tracker.active()
        if self._began:
            self._tracker.init(context.name)
        self._tracker.params(flat(context.parameters))

    def log(self, values: Mapping[str, float | Tensor], step: int) -> None:
        self._tracker.log(values, step=step)

    def progress(self, step: int, total_steps: int | None) -> None:
        self._tracker.progress(step, total_steps)

    def close(self, outcome: Outcome) -> None:
        if self._began:
            self._tracker.finish()
