"""Trials in this process: a `Trainer` for each, given up when others were better."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from trainkit.callbacks.base import Callback
from trainkit.errors import InvalidSetup
from trainkit.search.study import Pruned, Report, Task

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit
    from trainkit.trainer import Trainer

C = TypeVar("C")


class Pruning(Callback):
    """Reports an evaluation's result to the search, and ends the run when the search gives it up.

    The first process reports and decides for all of them.

    Args:
        report: of the trial's task.
        metric: the objective: a result such as `val/loss`.
    """

    def __init__(self, report: Report, metric: str) -> None:
        self._report, self._metric = report, metric
        self.pruned = False

    def on_evaluation_end(self, fit: Fit, results: Mapping[str, float]) -> None:
        give_up = fit.strategy.is_main and self._report(objective(results, self._metric), fit.state.step)
        if fit.strategy.gather(give_up)[0]:
            self.pruned = True
            fit.stop("the search gave this trial up")


def in_process(make: Callable[[Task[C]], Trainer], metric: str = "val/loss") -> Callable[[Task[C]], float]:
    """A runner that trains in this process, one trial at a time.

    Args:
        make: a new trainer, with a new module, for a trial; its files belong into `task.folder`.
        metric: the objective: a result of the last evaluation.
    """

    alone = threading.Lock()  # seeds and modes of torch belong to the whole process

    def run(task: Task[C]) -> float:
        pruning = Pruning(task.report, metric)
        with alone:
            trainer = make(task)
            trainer.callbacks = [*trainer.callbacks, pruning]
            fit = trainer.fit()
        if pruning.pruned:
            raise Pruned
        return objective(fit.results, metric)

    return run


def objective(results: Mapping[str, Any], metric: str) -> float:
    """The value of a result.

    Raises:
        InvalidSetup: there is none of that name.
    """
    if metric not in results:
        raise InvalidSetup(f"no result is called {metric!r}; there are: {', '.join(results) or 'none: give evaluate='}")
    return float(results[metric])
