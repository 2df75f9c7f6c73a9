"""What is due every so often in a run, and when the next of it can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.durations import AnyDuration, Cadence, Duration, Tokens
from trainkit.state import State

if TYPE_CHECKING:
    from trainkit.trainer import Trainer


class Cadences:
    """The cadences of one run, counted from its present state; None for what is never due.

    Args:
        evaluates: there are sets to evaluate on.
        compares: there are other processes to compare weights with.

    Attributes:
        log, evaluate, save, sync: of the training loss, of evaluations, of checkpoints, of looks for weights that
            went apart.
        in_tokens: the first setting that is counted in tokens, or "".
    """

    def __init__(
        self, trainer: Trainer, max_duration: Duration, state: State, *, evaluates: bool, compares: bool
    ) -> None:
        policy = trainer.checkpoints
        self.log = _cadence(trainer.log_every, state)
        self.evaluate = _cadence(trainer.evaluate_every if evaluates else None, state)
        self.save = _cadence(policy.every if policy is not None else None, state)
        self.sync = _cadence(trainer.check_sync_every if compares else None, state)
        named = {
            "max_duration": Cadence(max_duration, state),
            "log_every": self.log,
            "evaluate_every": self.evaluate,
            "Checkpoints(every=...)": self.save,
            "check_sync_every": self.sync,
        }
        self._all = [each for each in named.values() if each is not None]
        self.in_tokens = next((name for name, each in named.items() if each and isinstance(each.every, Tokens)), "")

    def saves(self, state: State) -> bool:
        """Whether a checkpoint is due."""
        return self.save is not None and self.save.due(state)

    def next_step(self, state: State) -> int:
        """The first step at which anything can be due, ends of epochs and evaluations aside."""
        return min(each.next_step(state) for each in self._all)


def _cadence(every: AnyDuration | None, state: State) -> Cadence | None:
    return Cadence(every, state) if every is not None else None
