"""Lengths of training as typed values: `Epochs(3)`, `Steps(500)`, or the same as text: `"3ep"`, `"500st"`.

A duration names a counter of `State`. `Cadence` turns one into "every so often" and answers in one comparison.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from trainkit.errors import InvalidSetup
from trainkit.state import State


@dataclass(frozen=True, slots=True)
class Duration:
    """A count of some unit. Use one of the subclasses.

    Raises:
        InvalidSetup: the count is not a positive whole number.
    """

    count: int

    unit: ClassVar[str]
    """The short name, as in `"3ep"`."""
    counter: ClassVar[str]
    """The field of `State` that counts it."""

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise InvalidSetup(f"a duration needs a whole number of at least 1, not {self.count!r}")

    def __str__(self) -> str:
        return f"{self.count}{self.unit}"

    def reached(self, state: State) -> bool:
        """Whether the run is at least this long."""
        return int(getattr(state, self.counter)) >= self.count


class Epochs(Duration):
    """Passes over the training data."""

    unit, counter = "ep", "epoch"


class Steps(Duration):
    """Batches of the whole run."""

    unit, counter = "st", "step"


class Updates(Duration):
    """Steps of the optimizer."""

    unit, counter = "up", "update"


class Samples(Duration):
    """Samples over all processes."""

    unit, counter = "sa", "samples"


class Tokens(Duration):
    """What steps count in `Loss.count`, over all processes."""

    unit, counter = "tok", "tokens"


class Evaluations(Duration):
    """Rounds of evaluation."""

    unit, counter = "ev", "evaluations"


AnyDuration: TypeAlias = Duration | str
"""A `Duration`, or its text: `"3ep"`, `"500st"`, `"200up"`, `"60000sa"`, `"1e9tok"`, `"2ev"`."""

_WORDS: dict[str, type[Duration]] = {
    **dict.fromkeys(("ep", "epoch"), Epochs),
    **dict.fromkeys(("st", "step"), Steps),
    **dict.fromkeys(("up", "update"), Updates),
    **dict.fromkeys(("sa", "sample"), Samples),
    **dict.fromkeys(("tok", "token"), Tokens),
    **dict.fromkeys(("ev", "eval", "evaluation"), Evaluations),
}
_TEXT = re.compile(r"\s*(\d[\d_]*|\d+e\d+)?\s*([a-z]+?)s?\s*", re.IGNORECASE)


def duration(value: AnyDuration) -> Duration:
    """Reads `"3ep"`, `"500 steps"`, `"1e9tok"` or `"epoch"` (one); a `Duration` is returned as it is.

    Raises:
        InvalidSetup: the text is no duration; the message says what is allowed.
    """
    if isinstance(value, Duration):
        return value
    match = _TEXT.fullmatch(value) if isinstance(value, str) else None
    kind = _WORDS.get(match[2].lower()) if match else None
    if match is None or kind is None:
        raise InvalidSetup(
            f"{value!r} is not a duration: write a whole number and a unit, for instance '3ep', '500st', '200up', "
            "'60000sa', '1e9tok' or '2ev' (epochs, steps, updates, samples, tokens, evaluations)"
        )
    count = float(match[1] or 1)
    if math.isinf(count):
        raise InvalidSetup(f"{value!r} is not a duration: the number is too large")
    return kind(int(count))


class Cadence:
    """Says when something is due that happens every `every`.

    It has no state of its own: what is due follows from the counters, so a resumed run keeps the rhythm.
    """

    __slots__ = ("_counter", "_every", "_next", "every")

    def __init__(self, every: AnyDuration, state: State) -> None:
        self.every = duration(every)
        self._counter, self._every = self.every.counter, self.every.count
        self._next = 0
        self.start(state)

    def start(self, state: State) -> None:
        """Takes the counters as they are for the place to count from."""
        self._next = (getattr(state, self._counter) // self._every + 1) * self._every

    def due(self, state: State) -> bool:
        """Whether a multiple of `every` was reached since it last was due."""
        if getattr(state, self._counter) < self._next:
            return False
        self.start(state)
        return True

    def next_step(self, state: State) -> int:
        """The first step at which it can be due, leaving aside the ends of epochs and evaluations. An update takes at
        least a step; how many samples or tokens the next step brings is not known."""
        if self._counter == "step":
            return self._next
        if self._counter == "update":
            return state.step + self._next - state.update
        return sys.maxsize if self._counter in ("epoch", "evaluations") else state.step + 1
