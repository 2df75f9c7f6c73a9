"""Weights of the losses in an accumulation window, so that its gradient is that of the whole global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainkit.module import Loss

if TYPE_CHECKING:
    from trainkit.data.feed import Feed
    from trainkit.state import State
    from trainkit.strategies.base import Strategy


class Window:
    """The window of one process.

    A mean is weighted before its backward pass, by the samples that it stands for. Sums go backward as they are, and
    the window's gradient is divided by what was counted, over all processes, before its update.

    Args:
        last_step: the step at which the run ends, if that is known; it may cut the last window short.

    Attributes:
        same_until: the position up to which all batches count as much as the present one.
        samples: in the present step's batch, over all processes.
        rows: those of them that are this process's.
        weight: what a mean loss over them counts: the batch's share of the window's samples, times the processes, over
            which gradients are averaged.
        sums: whether this window's steps return sums.
        denominator: what those are to be divided by, as far as it was counted on this process.
    """

    def __init__(self, feed: Feed, state: State, strategy: Strategy, accumulate: int, last_step: int) -> None:
        self._feed, self._state, self._strategy = feed, state, strategy
        self._accumulate, self._last_step = accumulate, last_step
        self._regular_until = self.same_until = 0
        self.samples = self.rows = 0
        self.weight = 1.0
        self.sums = False
        self.denominator: Tensor | float | None = None

    def start_epoch(self, steps: int | None) -> None:
        """Takes in how many steps the epoch has, if that is known."""
        self._regular_until, self.same_until = self._first_irregular(steps), 0

    def begin_step(self) -> None:
        """Takes in the step's batch, from the position `same_until` on."""
        position = self._state.position
        self.samples, self.rows = self._feed.samples(position), self._feed.rows(position)
        regular = position < self._regular_until
        self.weight = 1 / self._accumulate if regular else self._irregular_weight()
        self.same_until = self._regular_until if regular else 0

    def _irregular_weight(self) -> float:
        state = self._state
        first = state.position - state.window
        steps = self._feed.steps(state.epoch)
        end = first + min(self._accumulate, self._last_step - state.step + state.window)
        end = end if steps is None else min(end, steps)
        total = sum(self._feed.samples(position) for position in range(first, end))
        return self.rows * self._strategy.world_size / total

    def count(self, loss: Loss) -> None:
        """Counts what a sum is over."""
        self.sums = True
        if self.rows:
            self.denominator = loss.count + (0 if self.denominator is None else self.denominator)

    def divide(self) -> None:
        """Divides the gradients of sums by what was counted."""
        count = torch.as_tensor(self.denominator or 0.0, dtype=torch.float64, device=self._strategy.device)
        self.denominator, self.sums = None, False
        total = float(self._strategy.sum(count))
        self._state.tokens += round(total)
        factor = self._strategy.world_size / total if total else 0.0
        torch._foreach_mul_(self._strategy.gradients(), factor)

    def _first_irregular(self, steps: int | None) -> int:
        """The position up to which all windows are full and all processes have equal shares."""
        state = self._state
        if steps is None or self._feed.samples(0) % self._strategy.world_size:
            return 0
        end = min(steps - 1, state.position + self._last_step - state.step - 1)
        first = state.position - state.window  # with another accumulate than before, windows do not begin at 0
        return max(0, first + (end - first) // self._accumulate * self._accumulate)
