"""How many steps a run will have, as far as its duration and its data say."""

from __future__ import annotations

from trainkit.data.feed import Feed
from trainkit.data.loader import Loader
from trainkit.durations import Duration
from trainkit.state import State


def total_steps(
    feed: Feed, max_duration: Duration, state: State, *, accumulate: int, by_hand: bool = False
) -> int | None:
    """Returns the step at which the run will end; None when that is not known.

    The data is asked for the length of the present epoch alone, as training asks at the beginning of each epoch; later
    epochs are expected to be as long.

    Args:
        feed: the training data.
        max_duration: of the run.
        state: where the run is.
        accumulate: steps of one update.
        by_hand: the module makes any number of updates in a step.
    """
    if max_duration.reached(state):
        return state.step
    if max_duration.unit == "st":
        return max_duration.count
    if max_duration.unit == "up" and by_hand:
        return None
    steps = feed.steps(state.epoch)
    if max_duration.unit == "up" and accumulate == 1:
        return state.step + max_duration.count - state.update
    if not steps:
        return None
    epoch = _Epoch(steps, state.position, state.window, accumulate)
    match max_duration.unit:
        case "ep":
            left = epoch.left + (max_duration.count - state.epoch - 1) * steps
        case "up":
            left = epoch.until_update(max_duration.count - state.update)
        case "sa" if isinstance(feed, Loader):
            left = epoch.until_sample(max_duration.count - state.samples, feed.batch_size, feed.length(state.epoch))
        case _:
            return None
    return state.step + left


def updates_in(steps: int, state: State, left: int, accumulate: int) -> tuple[int, int]:
    """Returns how many updates the next `left` steps of a run make, and how many epochs they end or begin.

    Args:
        steps: of an epoch.
        state: where the run is.
        accumulate: steps of one update.
    """
    first = state.position - state.window
    here = min(left, steps - state.position)
    epochs, rest = divmod(left - here, steps)
    updates = -(-(state.position + here - first) // accumulate)
    return (
        updates + epochs * -(-steps // accumulate) + -(-rest // accumulate),
        bool(state.position + here) + epochs + bool(rest),
    )


class _Epoch:
    """The present epoch, which those after it are like.

    Attributes:
        left: steps until its end.
    """

    def __init__(self, steps: int, position: int, window: int, accumulate: int) -> None:
        self._steps, self._position, self._accumulate = steps, position, accumulate
        self._window_start = position - window
        self.left = steps - position

    def until_update(self, updates: int) -> int:
        """Steps until so many more updates were made. The last window of an epoch may be a short one."""
        here = -(-(self._steps - self._window_start) // self._accumulate)
        if updates <= here:
            return min(self._window_start + updates * self._accumulate, self._steps) - self._position
        epochs, rest = divmod(updates - here, -(-self._steps // self._accumulate))
        return self.left + epochs * self._steps + min(rest * self._accumulate, self._steps)

    def until_sample(self, samples: int, batch_size: int, length: int) -> int:
        """Steps until so many more samples were trained on, at the end of a window."""
        of_epoch = min(length, self._steps * batch_size)
        here = of_epoch - self._position * batch_size
        if samples <= here:
            return self._window_end(self._position + -(-samples // batch_size), self._window_start) - self._position
        epochs, rest = divmod(samples - here, of_epoch)
        return self.left + epochs * self._steps + self._window_end(-(-rest // batch_size), 0)

    def _window_end(self, position: int, first: int) -> int:
        """Where the window ends that the step before `position` is in, counting windows from `first`."""
        windows = -(-(position - first) // self._accumulate)
        return min(first + windows * self._accumulate, self._steps)
