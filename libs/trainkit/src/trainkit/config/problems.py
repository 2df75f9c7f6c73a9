"""What is wrong with a configuration, in a form for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.errors import InvalidSetup

Path = tuple[str | int, ...]
"""Where a value sits: `("optimizer", "betas", 1)`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `line` counts from 1; 0 when there is no file."""

    file: str = ""
    line: int = 0
    field: str = ""
    message: str = ""
    allowed: str = ""
    suggestion: str = ""

    def __str__(self) -> str:
        place = ":".join(part for part in (self.file, str(self.line or "")) if part)
        text = ": ".join(part for part in (place, self.field, self.message) if part)
        text += f"; allowed: {self.allowed}" if self.allowed else ""
        return text + (f"; did you mean {self.suggestion}?" if self.suggestion else "")


class ConfigError(InvalidSetup):
    """A configuration was refused. `problems` has everything that is wrong with it, in the order of its lines."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = sorted(problems, key=lambda problem: problem.line)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"the configuration has {count}:", *(f"  {each}" for each in self.problems)]))


def written(path: Path) -> str:
    """A path as people write it: `optimizer.betas[1]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")
