"""What is wrong with a document, in a form that both people and programs can use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

Path = tuple[str | int, ...]
"""Where a value sits in a document: `("spec", "command", 3)`."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a document. Fields as in the message `Problem` of the contracts."""

    file: str = ""
    line: int = 0
    field: str = ""
    value: str = ""
    message: str = ""
    allowed: str = ""
    suggestion: str = ""

    def __str__(self) -> str:
        place = ":".join(part for part in (self.file, str(self.line or "")) if part)
        text = ": ".join(part for part in (place, self.field, self.message) if part)
        if self.allowed:
            text += f"; allowed: {self.allowed}"
        if self.suggestion:
            text += f"; did you mean {self.suggestion}?"
        return text


class SpecError(ValueError):
    """A document was refused. `problems` has everything that is wrong with it, in the order of its lines."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = sorted(problems, key=lambda problem: problem.line)
        count = len(self.problems)
        title = "1 problem" if count == 1 else f"{count} problems"
        super().__init__("\n".join([f"the document has {title}:", *(f"  {problem}" for problem in self.problems)]))


def field_path(path: Path) -> str:
    """A path as people write it: `spec.command[3]`, `metadata.labels['a/b']`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_KEY.match(part):
            text += f".{part}" if text else part
        else:
            text += f"[{part!r}]"
    return text
