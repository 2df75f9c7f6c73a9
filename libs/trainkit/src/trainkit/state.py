"""How far a run is. What decides what comes next is a number in here, so that it can be stored and read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(slots=True)
class State:
    """Counters of one run, the same on every process. Callbacks read it; only the loop writes it.

    A step is one batch of the whole run, over all processes; an update is one step of the optimizer. With
    `accumulate=4` four steps make one update.
    """

    epoch: int = 0
    """Epochs completed; while training, the index of the present one."""
    step: int = 0
    """Steps completed since the run began."""
    update: int = 0
    """Updates of the weights since the run began, those that were skipped included."""
    skipped: int = 0
    """Updates that were left out because a gradient was not finite."""
    samples: int = 0
    """Samples trained on, over all processes."""
    tokens: int = 0
    """What `Loss.count` adds up to over all processes; 0 when steps return plain tensors."""
    position: int = 0
    """Steps completed within the present epoch."""
    window: int = 0
    """Steps completed within the present accumulation window."""
    evaluations: int = 0
    """Rounds of evaluation completed."""
    evaluated_at: int = -1
    """The step of the last one."""
    checkpoints: int = 0
    """Checkpoints begun, but for the last one of a run that a signal ended."""
    finished: bool = False
    """The run reached its `max_duration`, or was stopped for good."""

    def to_dict(self) -> dict[str, int | bool]:
        return asdict(self)

    def load(self, values: Mapping[str, int | bool]) -> None:
        """Takes over stored counters. Names that this version does not know are ignored."""
        for name, value in values.items():
            if hasattr(self, name):
                setattr(self, name, value)
