"""The base of trackers.

`log` is called between two steps: it has to return at once and never raise. A tracker that talks to a network or waits
for a disk hands its rows to a thread or process of its own. Only the first process has open trackers.

What raises all the same never ends a run: `log` loses its row, and the next one is tried; a warning says so once, and
another one at the end how many rows were lost.

A resumed series has no doubled and no missing step: `flush` is called before a checkpoint counts, so what was logged up
to it is safe; and `open` says at which step the run goes on, so that rows of a life that was killed can be hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

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
    """The step that this life goes on from; rows with a greater step belong to a killed life. None: a fresh start."""
    world_size: int = 1


class Tracker(ABC):
    """Stores series of numbers."""

    @abstractmethod
    def open(self, context: RunContext) -> None:
        """Called once before the first `log`, after a resume.

        Raises:
            TrainkitError: the place cannot be reached or written; training does not begin.
        """

    @abstractmethod
    def log(self, values: Mapping[str, float | Tensor], step: int) -> None:
        """Takes one row. Tensors are scalars and never change afterwards; reading them may wait for the device, so do
        it off the training thread where that matters."""

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
