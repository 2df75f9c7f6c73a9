"""What a search tries: distributions over the fields of a configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainkit.errors import InvalidSetup

if TYPE_CHECKING:
    from optuna import Trial


@dataclass(frozen=True, slots=True)
class Uniform:
    """A number from a range, in any order of its ends; whole when both ends are. `log`: by orders of magnitude."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if self.log and min(self.low, self.high) <= 0:
            raise InvalidSetup(f"orders of magnitude need a range above 0, not {self.low} to {self.high}")

    def any(self) -> float:
        """One value of the range."""
        return self.low

    def draw(self, trial: Trial, name: str) -> float:
        """The value of a trial."""
        low, high = sorted((self.low, self.high))
        if isinstance(low, int) and isinstance(high, int):
            return trial.suggest_int(name, low, high, log=self.log)
        return trial.suggest_float(name, low, high, log=self.log)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some values: numbers, texts, or anything that a configuration may hold."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise InvalidSetup("a choice needs at least one value")

    def any(self) -> Any:
        """One of the values."""
        return self.values[0]

    def draw(self, trial: Trial, name: str) -> Any:
        """The value of a trial. What the study cannot store is stored as its number in the list."""
        if not any(isinstance(value, (Mapping, list, tuple)) for value in self.values):
            return trial.suggest_categorical(name, list(self.values))
        return self.values[trial.suggest_int(name, 0, len(self.values) - 1)]


Space = Mapping[str, Uniform | Choice]
"""By the path of a field: `{"optimizer.lr": Uniform(1e-5, 1e-2, log=True), "batch_size": Choice((16, 32))}`."""


def changed(settings: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Plain settings with one value replaced, or added: `optimizer.lr`, `layers[1].width`.

    Raises:
        InvalidSetup: the path leads through a value that holds no others.
    """
    parts = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", path)]
    return _changed(settings, parts, value, path)  # type: ignore[no-any-return]


def _changed(node: Any, parts: list[int | str], value: Any, path: str) -> Any:
    if not parts:
        return value
    first, *rest = parts
    if isinstance(node, Mapping) and isinstance(first, str):
        return {**node, first: _changed(node.get(first), rest, value, path)}
    if isinstance(node, list) and isinstance(first, int) and first < len(node):
        return [_changed(each, rest, value, path) if at == first else each for at, each in enumerate(node)]
    raise InvalidSetup(f"{path!r} is no place in the configuration: at {first!r} there is {node!r}")
