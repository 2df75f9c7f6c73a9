"""When checkpoints are made, where, and which of them are kept."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainkit.durations import AnyDuration, duration
from trainkit.errors import InvalidSetup


@dataclass(frozen=True, kw_only=True)
class Best:
    """Which checkpoint is the best one.

    Args:
        metric: a name in the results of an evaluation, such as `val/loss`.
        mode: whether the least or the greatest value is best.

    Raises:
        InvalidSetup: the mode is another word.
    """

    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str):
            raise InvalidSetup(f"metric={self.metric!r}: give the name of a result, for instance 'val/loss'")
        if self.mode not in ("min", "max"):
            raise InvalidSetup(f"mode={self.mode!r}: choose min or max")

    def better(self, new: float, old: float | None) -> bool:
        """Whether `new` improves on `old`. What is not a number never does."""
        if new != new:
            return False
        return old is None or (new < old if self.mode == "min" else new > old)


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The policy of one run.

    Args:
        folder: where checkpoints are; None is `TRAINYARD_CHECKPOINT_DIR`, else `checkpoints`.
        every: how often; None makes one only at the end, on SIGTERM and when `Fit.checkpoint()` is called.
        keep_last: how many of the newest stay. At least 1.
        best: keeps the best one too.
        asynchronous: training goes on while the bytes are written; it waits only for the copy.
        at_end: makes one when the run ends as it should.
        resume: `"auto"` goes on from the newest good checkpoint if there is one (`TRAINYARD_RESUME_FROM` wins),
            `"must"` wants one, `"never"` starts anew and refuses a folder that has some; a path names one.
        grace_s: the longest that the end of a run waits for its last checkpoint, in seconds.

    Raises:
        InvalidSetup: a value is out of its range.
    """

    folder: Path | str | None = None
    every: AnyDuration | None = "1ep"
    keep_last: int = 3
    best: Best | None = None
    asynchronous: bool = True
    at_end: bool = True
    resume: Literal["auto", "must", "never"] | Path = "auto"
    grace_s: float = 600.0

    def place(self) -> Path:
        """The folder: as given, else where the yard wants checkpoints, else `checkpoints`."""
        return Path(self.folder or os.environ.get("TRAINYARD_CHECKPOINT_DIR", "checkpoints"))

    def __post_init__(self) -> None:
        if self.folder is not None and not isinstance(self.folder, str | Path):
            raise InvalidSetup(f"folder={self.folder!r}: give a path, or None")
        if self.every is not None:
            duration(self.every)
        if not isinstance(self.resume, Path) and self.resume not in ("auto", "must", "never"):
            raise InvalidSetup(
                f"resume={self.resume!r}: choose auto, must or never, or give the Path of a checkpoint, for instance "
                "Path('checkpoints/step-900')"
            )
        if self.best is not None and not isinstance(self.best, Best):
            raise InvalidSetup(f"best={self.best!r}: give Best(metric=...), for instance Best(metric='val/loss')")
        if type(self.keep_last) is not int or self.keep_last < 1:
            raise InvalidSetup(
                f"keep_last has to be a whole number of at least 1, not {self.keep_last!r}: a run resumes from its "
                "last checkpoint"
            )
        if type(self.grace_s) not in (int, float) or not self.grace_s > 0:
            raise InvalidSetup(f"grace_s has to be a number of seconds greater than 0, not {self.grace_s!r}")
        for setting in ("asynchronous", "at_end"):
            if not isinstance(given := getattr(self, setting), bool):
                raise InvalidSetup(f"{setting} has to be True or False, not {given!r}")
