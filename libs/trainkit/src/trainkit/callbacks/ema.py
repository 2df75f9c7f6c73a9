"""The exponential moving average of the weights, sharded as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.callbacks.base import Callback
from trainkit.errors import InvalidSetup, WrongCheckpoint
from trainkit.sharded import local

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit
    from trainkit.strategies.base import Strategy


class EMA(Callback):
    """Averages the weights over updates and evaluates with the average.

    Every process averages its own shards: nothing is communicated. Averages of weights in 16 bits are kept in 32, where
    a small change is not lost. The averages are in every checkpoint, so a resumed
    run continues them with the same bits; added to a run that had none, they begin with the weights it goes on from.
    Put it behind `KeepBest` in the list of callbacks to have the averages saved: the trained weights are put back at
    its own turn.

    Args:
        decay: what the average keeps at an update, below 1.
        every: updates between two of its own.
        warm_up: keep less at first: at most (1 + n) / (10 + n) at its n-th, so that early weights are forgotten.
        evaluate: swap the averages in for evaluations.

    Raises:
        InvalidSetup: a decay outside of [0, 1), or `every` below 1.
    """

    def __init__(self, decay: float = 0.999, *, every: int = 1, warm_up: bool = True, evaluate: bool = True) -> None:
        if not 0.0 <= decay < 1.0:
            raise InvalidSetup(f"decay has to be at least 0 and below 1, not {decay}")
        if every < 1:
            raise InvalidSetup(f"every has to be at least 1, not {every}")
        self._decay, self._every, self._warm_up, self._evaluate = decay, every, warm_up, evaluate
        self.averages: dict[str, Tensor] = {}
        self.updates = 0
        self._weights: dict[str, Tensor] = {}
        self._strategy: Strategy | None = None
        self._swapped = self._stored = False
        self._exact: dict[str, Tensor] = {}  # while swapped: averages that the weights' format does not hold

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"decay": self._decay, "every": self._every, "warm_up": self._warm_up, "evaluate": self._evaluate}

    def state_dict(self) -> Mapping[str, Any]:
        return {"averages": self.averages, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.averages.keys() != state["averages"].keys():
            one = min(self.averages.keys() ^ state["averages"].keys())
            raise WrongCheckpoint(f"the checkpoint's averages are of other parameters: {one} is in one of them only")
        with torch.no_grad():
            for name, average in self.averages.items():
                average.copy_(state["averages"][name])
        self.updates, self._stored = int(state["updates"]), True

    def on_fit_start(self, fit: Fit) -> None:
        if not fit.strategy.holds_weights:
            raise InvalidSetup(
                "EMA reads the module's weights, which stage 3 of deepspeed takes away: use stage 2 or fsdp"
            )
        self._strategy = fit.strategy
        self._weights = {
            name: each.detach()
            for name, each in fit.module.named_parameters()
            if each.is_floating_point() or each.is_complex()
        }
        self.averages = {name: each.to(_wide(each.dtype), copy=True) for name, each in self._weights.items()}
        self.updates, self._stored = 0, False

    def on_resume(self, fit: Fit) -> None:
        if not self._stored:  # it is new in this run: the average begins with the weights as they are now
            for average, weight in zip(_local(self.averages), _local(self._weights), strict=True):
                average.copy_(weight)

    def on_update_end(self, fit: Fit) -> None:
        if fit.state.update % self._every:
            return
        self.updates += 1
        kept = min(self._decay, (1 + self.updates) / (10 + self.updates)) if self._warm_up else self._decay
        averages = _local(self.averages)
        weights = [each.to(average.dtype) for each, average in zip(_local(self._weights), averages, strict=True)]
        torch._foreach_lerp_(averages, weights, 1.0 - kept)

    def on_evaluation_start(self, fit: Fit) -> None:
        if self._evaluate:
            self.swap()

    def on_evaluation_end(self, fit: Fit, results: Mapping[str, float]) -> None:
        if self._swapped:
            self.swap()

    def on_evaluation_left(self, fit: Fit) -> None:
        if self._swapped:
            self.swap()

    def on_error(self, fit: Fit, error: BaseException) -> None:
        if self._swapped:
            self.swap()

    def swap(self) -> None:
        """Exchanges the module's weights and their averages; a second call undoes it. All processes call it, between
        two steps of a run."""
        assert self._strategy is not None
        with self._strategy.writing_weights():
            for name, weight, average in zip(self.averages, _local(self._weights), _local(self.averages), strict=True):
                held = weight.to(average.dtype, copy=True)
                if not self._swapped and weight.dtype != average.dtype:
                    self._exact[name] = average.clone()
                weight.copy_(average)
                average.copy_(self._exact.pop(name, held) if self._swapped else held)
        self._swapped = not self._swapped


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """This process's part of each."""
    return [local(each) for each in tensors.values()]
