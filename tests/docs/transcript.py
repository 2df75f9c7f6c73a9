"""Reads the runnable parts of a page: files it shows, commands, and the output it promises.

- A fence with `file=NAME` after its language is written to that file.
- In a `console` fence a line that begins with `$ ` is a command; `# exits with N` after it is its exit code, else 0.
- The lines below a command have to come in its output in that order; `...` stands for anything, and what comes before
  or after a line's text does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_EXIT = re.compile(r"\s+# exits with (\d+)$")


@dataclass(frozen=True, slots=True)
class File:
    """A file that the page has the reader write."""

    name: str
    content: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the page and what it promises."""

    text: str
    exit_code: int
    output: Sequence[str]

    def missing_from(self, output: str) -> str | None:
        """The first promised line that does not come, in its place, in the output."""
        lines = iter(output.splitlines())
        for promised in self.output:
            pattern = ".*".join(re.escape(part.strip()) for part in promised.split("..."))
            if not any(re.search(pattern, line) for line in lines):
                return promised
        return None


Step = File | Command


def steps(page: str) -> Iterator[Step]:
    """Everything a reader who follows the page does, in order."""
    for fence in _FENCE.finditer(page):
        language, _, rest = fence["info"].partition(" ")
        if rest.startswith("file="):
            yield File(rest.removeprefix("file="), fence["body"])
        elif language == "console":
            yield from _commands(fence["body"])


def _commands(block: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        first, *output = part.rstrip("\n").split("\n")
        code = _EXIT.search(first)
        yield Command(_EXIT.sub("", first), int(code[1]) if code else 0, output)
