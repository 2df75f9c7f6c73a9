"""Places at which a run can end: all processes come past the same ones in the same order, and can compare them."""

from __future__ import annotations

import sys
from typing import TypeAlias

Place: TypeAlias = tuple[int, int, int, int]
"""Steps done; then 0 for what follows a step, 1 for the end of that, 2 for the evaluation after the last step; then the
number of the evaluation set and the batches done of it."""

END = sys.maxsize
"""As a number of batches: all of the set, also when that is not the same number on every process."""


def before_evaluation(step: int) -> Place:
    """A step was made, and what is due after it begins."""
    return (step, 0, -1, 0)


def after_step(step: int) -> Place:
    """A step, and what was due after it, are done."""
    return (step, 1, 0, 0)


def in_evaluation(step: int, at: int, batch: int, late: bool) -> Place:
    """Within the evaluation that follows a step, or the one after the last step (`late`)."""
    return (step, 2 if late else 0, at, batch)
