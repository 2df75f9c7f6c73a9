"""Trials as jobs of a yard: submitted, followed by what they log, cancelled when others were better."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import uuid4

from trainkit.extras import require
from trainkit.search.local import objective
from trainkit.search.study import Pruned, Report, Task

if TYPE_CHECKING:
    from trainyard.client import Client, JobHandle

C = TypeVar("C")
T = TypeVar("T")

MARK = "job"
"""In a trial's folder while its job may be running: the job's id."""


@dataclass
class Jobs(Generic[C]):
    """A runner that submits a job for each trial; `Search.optimize(n, workers=4)` has four of them at once.

    What a job logs under `metric` is reported to the search, and the last value is the trial's. A trial that the search
    gives up is cancelled. A job that fails, or that somebody cancels, is a failed trial. When the search is interrupted
    its jobs are cancelled; when it was killed, the next one cancels what is left of them before its first trial.

    Args:
        yard: where jobs run.
        job: makes the job of a trial, in any form that `Client.submit` takes. The trial's values go into its arguments
            or its environment.
        metric: the objective: a series that the job logs.
        every_s: how often its values are looked at, in seconds.
        patience_s: how long a yard that cannot be reached is waited for, in seconds.

    Raises:
        MissingExtra: `trainyard` is not installed.
    """

    yard: Client
    job: Callable[[Task[C]], Any]
    metric: str = "val/loss"
    every_s: float = 1.0
    patience_s: float = 600.0
    _errors: Any = field(init=False, repr=False)
    _first: threading.Lock = field(init=False, repr=False, default_factory=threading.Lock)
    _cleared: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        self._errors = require("trainyard.errors", "a search through jobs")

    def __call__(self, task: Task[C]) -> float:
        """The last value that the trial's job logged.

        Raises:
            Pruned: the search gave the trial up, and its job was cancelled.
            InvalidSetup: the job succeeded and logged no such metric.
            YardError: the job failed or was cancelled, or the yard did not answer for too long.
        """
        self._clear(task.folder.parent)
        # One key for all tries: an answer that was lost on its way makes no second job.
        job = self._asked(partial(self.yard.submit, self.job(task), idempotency_key=uuid4().hex))
        mark = task.folder / MARK
        mark.write_text(job.id)
        try:
            return self._followed(job, task.report)
        finally:
            self._end(job)
            mark.unlink()

    def _followed(self, job: JobHandle, report: Report) -> float:
        step = -1
        while True:
            ended = self._asked(partial(self._ended, job))
            step, give_up = self._report(job, report, step + 1)
            if ended:
                return objective(self._asked(job.values), self.metric)
            if give_up:
                raise Pruned

    def _ended(self, job: JobHandle) -> bool:
        """Whether it succeeded within the time between two looks."""
        try:
            job.wait(self.every_s)
        except TimeoutError:
            return False
        return True

    def _report(self, job: JobHandle, report: Report, from_step: int) -> tuple[int, bool]:
        """Tells the search what is new. Returns the last step, and whether the search gives the trial up."""
        found = self._asked(partial(self.yard.metrics, job.id, [self.metric], from_step=from_step, max_points=0))
        step, give_up = from_step - 1, False
        for series in sorted(found, key=lambda each: each.rank)[:1]:
            for step, value in zip(series.step, series.value, strict=True):
                give_up = report(value, step)
        return step, give_up

    def _end(self, job: JobHandle) -> None:
        """Leaves no job that runs on."""
        with contextlib.suppress(self._errors.Conflict):  # it has ended, as it should
            self._asked(job.cancel)
            self._asked(partial(job.wait, check=False))

    def _clear(self, study: Path) -> None:
        with self._first:
            for mark in [] if self._cleared else sorted(study.glob(f"trial-*/{MARK}")):
                with contextlib.suppress(self._errors.NotFound):
                    self._end(self._asked(partial(self.yard.job, mark.read_text())))
                mark.unlink()
            self._cleared = True

    def _asked(self, ask: Callable[[], T]) -> T:
        """The yard's answer; one that is being started again is waited for."""
        until = time.monotonic() + self.patience_s
        while True:
            try:
                return ask()
            except self._errors.NotRunning:
                if time.monotonic() > until:
                    raise
                time.sleep(self.every_s)
