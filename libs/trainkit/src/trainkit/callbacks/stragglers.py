"""Finds processes that the others wait for."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.callbacks.base import Callback
from trainkit.durations import AnyDuration, Cadence
from trainkit.errors import InvalidSetup

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit

_log = logging.getLogger("trainkit")


@dataclass(frozen=True, slots=True)
class Straggler:
    """A process that was slower than the others. Times are means over its steps since the last look, in seconds."""

    rank: int
    step: int
    loading_s: float
    forward_s: float
    others_s: float
    """The median of the other processes, loading and forward together."""


class Stragglers(Callback):
    """Compares how long every process takes to load a batch and to go forward, and warns of those that take longer.

    The rest of a step is no use for that: gradients meet in the backward pass, so there all processes take as long as
    the slowest. Under FSDP they meet in the forward pass too, and what is compared is mostly the loading. On an
    accelerator the forward time is that of the host. The slowest time and the median go to the trackers as
    `step_time/slowest` and `step_time/median`.

    Args:
        every: how often processes compare.
        factor: how many times as long as the median of the others is too long.

    Attributes:
        found: all stragglers so far; the same on every process.

    Raises:
        InvalidSetup: a factor that is not above 1.
    """

    clock: Callable[[], float] = staticmethod(time.perf_counter)
    """Seconds; a subclass may have another."""

    def __init__(self, every: AnyDuration = "100st", *, factor: float = 1.5) -> None:
        if not factor > 1:
            raise InvalidSetup(f"factor has to be above 1, not {factor}: it says how many times as long is too long")
        self._every, self._factor = every, factor
        self.found: list[Straggler] = []

    def on_fit_start(self, fit: Fit) -> None:
        self._cadence: Cadence | None = None
        self._start()

    def on_epoch_start(self, fit: Fit) -> None:
        self._ended = self.clock()

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        self._loaded = self.clock()
        self._loading += self._loaded - self._ended

    def on_forward_end(self, fit: Fit, loss: Tensor) -> None:
        self._forward += self.clock() - self._loaded

    def on_evaluation_end(self, fit: Fit, results: Mapping[str, float]) -> None:
        self._ended = self.clock()  # what it took is no loading

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        self._steps += 1
        if self._cadence is None:  # counts from where a resumed run goes on
            self._cadence = Cadence(self._every, fit.state)
        elif self._cadence.due(fit.state):
            self._compare(fit)
        self._ended = self.clock()

    def _start(self) -> None:
        self._loading = self._forward = 0.0
        self._steps = 0

    def _compare(self, fit: Fit) -> None:
        mine = (self._loading / self._steps, self._forward / self._steps)
        everyones = fit.strategy.gather(mine)
        self._start()
        totals = [sum(each) for each in everyones]
        fit.log({"step_time/slowest": max(totals), "step_time/median": statistics.median(totals)})
        for rank, (loading, forward) in enumerate(everyones):
            others = totals[:rank] + totals[rank + 1 :]
            if others and totals[rank] > self._factor * (usual := statistics.median(others)):
                self._tell(fit, Straggler(rank, fit.state.step, loading, forward, usual))

    def _tell(self, fit: Fit, one: Straggler) -> None:
        self.found.append(one)
        if fit.strategy.is_main:
            _log.warning(
                "rank %d is slow up to step %d: %.3g s a step for loading and %.3g s for the forward pass, the others "
                "take %.3g s for both: look at that machine's load, disk and cooling",
                *(one.rank, one.step, one.loading_s, one.forward_s, one.others_s),
            )
