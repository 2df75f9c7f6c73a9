"""The base of trackers.

`log` is called between two steps: it has to return at once and never raise. A tracker that talks to a network or waits
for a disk hands its rows to a thread or process of its own. Only the first process has open trackers.

What raises all the same never ends a run: `log` loses its row, and the next one is tried; a warning says so once, and
another one at the end how many rows were lost.

A resumed series has every row once: `flush` is called before a checkpoint counts, so what was logged up to it is safe;
and the context of `open` says up to which time rows belong to that checkpoint, so that later ones, which the killed
process logged and the resumed one logs again, can be removed. The step is not enough for that: rows of one step can
be on both sides of a checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from trainkit.trackers.clock import Clock

Outcome = Literal["finished", "stopped", "failed"]
"""`stopped`: asked to end (SIGTERM, SIGINT) and to be continued."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a tracker may know of the run."""

    name: str
    """The run's name; the same in every life of a resumed run."""
    folder: Path | None
    """Where the run keeps its files, or None when it keeps none."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run, nested, of plain values."""
    resumed_step: int | None = None
    """The step that this process resumed from. None: a fresh start."""
    resumed_time: float | None = None
    """Rows logged after this time, in seconds since 1970 by `clock`, are not in the checkpoint and come again, whatever
    their step. None: a fresh start, or a checkpoint of an older trainkit; then rows after `resumed_step` come again."""
    world_size: int = 1
    clock: Clock = field(default_factory=Clock)
    """Gives rows their times."""

    def keeps(self, step: int, time: float) -> bool:
        """Whether a stored row of this step and time belongs to the resumed run, and does not come again."""
        if self.resumed_step is None:
            return False
        return step <= self.resumed_step if self.resumed_time is None else time <= self.resumed_time


class Tracker(ABC):
    """Stores series of numbers."""

    @property
    def destination(self) -> str | None:
        """Where an open tracker stores rows; two of one run cannot store to the same place. None: not known."""
        return None

    @abstractmethod
    def open(self, context: RunContext) -> None:
        """Called once before the first `log`, after a resume.

        Raises:
            TrainkitError: the place cannot be reached or written; training does not begin.
        """

    @abstractmethod
    def log(self, values: Mapping[str, float | Tensor], step: int) -> None:
        """Takes one row. The values are the tracker's own: nothing changes them afterwards. Those on the host are
        numbers. Those on a device are tensors; reading them waits for the device, so do it off the training thread
        where that matters."""

    def progress(self, step: int, total_steps: int | None) -> None:  # noqa: B027 - most trackers show no progress
        """Takes how far the run is, whenever that may have changed by much: before its first step, with every row, and
        at the ends of epochs and of the run.

        Args:
            step: steps completed.
            total_steps: the step at which the run will end; None when the duration and the data do not say.
        """

    def flush(self) -> None:  # noqa: B027 - what needs no flushing has nothing to override
        """Returns when the rows so far survive a kill of this process; called before a checkpoint counts."""

    @abstractmethod
    def close(self, outcome: Outcome) -> None:
        """Called once, also after an error; waits for what is not stored yet, within a bound of its own."""
