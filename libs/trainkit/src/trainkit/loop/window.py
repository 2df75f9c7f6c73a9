"""Weights of the losses in an accumulation window, so that its gradient is that of the whole global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainkit.data.counted import Counted
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
        expected, weighed: of data whose rows are known only once they were read: what the window's batches were
            expected to count together, and what they counted so far.
    """

    def __init__(self, feed: Feed, state: State, strategy: Strategy, accumulate: int, last_step: int) -> None:
        self._feed, self._state, self._strategy = feed, state, strategy
        self._accumulate, self._last_step = accumulate, last_step
        self._counted = feed if isinstance(feed, Counted) else None
        self._shares = accumulate > 1 or strategy.world_size > 1  # a batch on its own counts 1
        self._regular_until = self.same_until = 0
        self.samples = self.rows = 0
        self.weight = 1.0
        self.sums = False
        self.denominator: Tensor | float | None = None
        self.expected = self.weighed = 0

    def start_epoch(self, steps: int | None) -> None:
        """Takes in how many steps the epoch has, if that is known."""
        self._regular_until, self.same_until = self._first_irregular(steps), 0

    def begin_step(self) -> None:
        """Takes in the step's batch, from the position `same_until` on."""
        if (counted := self._counted) is not None:
            self.samples, self.rows = counted.present
            if self._shares:
                self.weight = self._counted_weight(counted)
            return
        epoch, position = self._state.epoch, self._state.position
        self.samples, self.rows = self._feed.samples(epoch, position), self._feed.rows(epoch, position)
        regular = position < self._regular_until
        self.weight = 1 / self._accumulate if regular else self.rows * self._strategy.world_size / self.planned()
        self.same_until = self._regular_until if regular else 0

    def planned(self) -> int:
        """Samples of the present window over all processes, if it ends as planned; 0 where that is not known before
        they were read."""
        if self._counted is not None:
            return 0
        state = self._state
        first = state.position - state.window
        steps = self._feed.steps(state.epoch)
        left = max(self._last_step - state.step, 1)  # a run that was to end within the window ends after its next step
        end = first + min(self._accumulate, left + state.window)
        end = end if steps is None else min(end, steps)
        return sum(self._feed.samples(state.epoch, position) for position in range(first, end))

    def _counted_weight(self, feed: Counted) -> float:
        state = self._state
        if not state.window:
            steps = feed.steps(state.epoch)
            length = min(self._accumulate, self._last_step - state.step)
            length = length if steps is None else min(length, steps - state.position)
            self.expected, self.weighed = feed.all_units * max(length, 1), 0
        self.weighed += feed.all_units
        return feed.units * self._strategy.world_size / self.expected

    def correct(self) -> None:
        """Scales the gradients of means to what the window's batches counted: it ended early, or they differ."""
        torch._foreach_mul_(self._strategy.gradients(), self.expected / self.weighed)

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
        if self._counted is not None or steps is None:
            return 0
        if self._feed.samples(state.epoch, 0) % self._strategy.world_size:
            return 0
        end = min(steps - 1, state.position + self._last_step - state.step - 1)
        first = state.position - state.window  # with another accumulate than before, windows do not begin at 0
        return max(0, first + (end - first) // self._accumulate * self._accumulate)
