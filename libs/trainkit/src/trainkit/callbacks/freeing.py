"""Memory that is given back in the course of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from trainkit import memory
from trainkit.callbacks.base import Callback
from trainkit.durations import AnyDuration, Cadence

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit


class FreeMemory(Callback):
    """Collects garbage and empties the accelerator's cache after every epoch and every evaluation.

    Args:
        every: also this often in between, for instance `500st`; None: not.
    """

    def __init__(self, every: AnyDuration | None = None) -> None:
        self._every = every
        self._cadence: Cadence | None = None

    def on_fit_start(self, fit: Fit) -> None:
        self._cadence = None

    def on_epoch_start(self, fit: Fit) -> None:
        if self._cadence is None and self._every is not None:
            self._cadence = Cadence(self._every, fit.state)

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        if self._cadence is not None and self._cadence.due(fit.state):
            memory.free()

    def on_evaluation_end(self, fit: Fit, results: Mapping[str, float]) -> None:
        memory.free()

    def on_epoch_end(self, fit: Fit) -> None:
        memory.free()
