"""Mutations: small deliberate faults, stored as data, each of which breaks one clause of one row.

They are in `scripts/mutations/<system>/<section>.toml`. CONTRIBUTING.md describes how to add one.
"""

from __future__ import annotations

import ast
import functools
import random
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "mutations"
TESTS = "libs/trainkit/tests"
SYSTEMS = ("accmt",)
ROWS_A_DAY = 10
SLOW_ROWS_A_DAY = 2
_MARK = re.compile(r'mark\.spec\("([^"]+)"\)')


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        row: id of the row whose own tests must fail.
        clause: what the fault breaks, in a few words.
        file: the source, relative to the repository.
        old: text that occurs exactly once in the source.
        new: what replaces it.
        raises: exception that also counts as caught, for a row that is about exactly this exception.
        because: why `raises` counts, or why the fault may raise, or change names or parameters.
    """

    system: str
    row: str
    clause: str
    file: str
    old: str
    new: str
    raises: str = ""
    because: str = ""

    def applied(self, text: str) -> str:
        """Returns the source with the fault; raises ValueError unless the old text occurs exactly once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"the old text occurs {count} times in {self.file}; expected exactly once")
        return text.replace(self.old, self.new)


def titles(system: str) -> dict[str, str]:
    """Returns the title of each row of a system."""
    lines = (ROOT / "scripts" / f"dialects_{system}.txt").read_text("utf-8").splitlines()
    return dict(line.split(" ", 1) for line in lines)


def load(folder: Path = FOLDER) -> list[Mutation]:
    """Returns all mutations, in the order of their rows; raises SystemExit for a file that is not of the format."""
    found: list[Mutation] = []
    for file in sorted(folder.glob("*/*.toml")):
        try:
            entries = tomllib.loads(file.read_text("utf-8")).get("mutation", [])
            found += [Mutation(system=file.parent.name, **entry) for entry in entries]
        except (tomllib.TOMLDecodeError, TypeError) as error:
            raise SystemExit(f"{file}: {error}") from error
    return sorted(found, key=lambda each: (each.system, each.row))


def without(system: str, found: Sequence[Mutation]) -> list[str]:
    """Returns the rows of a system that have no mutation."""
    return [row for row in titles(system) if row not in {each.row for each in found}]


def of_the_day(found: Sequence[Mutation], day: date) -> list[Mutation]:
    """Returns one mutation of each of the rows that are chosen by the date."""
    draw = random.Random(day.isoformat())
    rows: dict[str, list[Mutation]] = defaultdict(list)
    for each in found:
        rows[each.row].append(each)
    slow, chosen = _on_processes(), list[str]()
    for row in draw.sample(sorted(rows), len(rows)):
        if row not in slow or len(slow.intersection(chosen)) < SLOW_ROWS_A_DAY:
            chosen.append(row)
    return [draw.choice(rows[row]) for row in sorted(chosen[:ROWS_A_DAY])]


def _on_processes() -> set[str]:
    """Returns the rows that are named in files whose tests start several processes, which take the longest."""
    texts = (file.read_text("utf-8") for file in (ROOT / TESTS).rglob("test_*.py"))
    return {row for text in texts if "processes=2" in text for row in _MARK.findall(text)}


def problems(found: Sequence[Mutation]) -> list[str]:
    """Returns what is wrong with mutations: those that do not apply, and those that do more than they may."""
    known = {system: titles(system) for system in SYSTEMS}
    clauses = Counter((each.row, each.clause) for each in found)
    return [
        f"{each.row} ({each.clause}): {problem}"
        for each in found
        for problem in _problems(each, known, clauses[each.row, each.clause])
    ]


def _problems(each: Mutation, known: dict[str, dict[str, str]], same: int) -> Iterator[str]:
    if each.row not in known.get(each.system, {}):
        yield f"{each.system} has no such row"
    if same > 1:
        yield "this clause occurs twice; give each mutation of a row a clause of its own"
    if each.raises and not each.because:
        yield "`raises` needs `because`: the reason why the row is about this exception"
    path = ROOT / each.file
    if not path.is_file():
        yield f"there is no file {each.file}"
        return
    before = _read(path)
    try:
        after = _Source.of(each.applied(before.text))
    except (ValueError, SyntaxError) as error:
        yield str(error)
        return
    if before.meaning == after.meaning:
        yield "the new text means the same as the old one"
    if each.because:
        return
    if after.raises > before.raises:
        yield "the new text raises; change a value, a branch, an order or a default, or say `because`"
    if after.names != before.names:
        yield "the new text changes names or parameters; change a value, a branch, an order or a default"


@dataclass(frozen=True)
class _Source:
    """What of a source is compared with the source that has a fault."""

    text: str
    meaning: str
    raises: int
    names: Counter[str]

    @classmethod
    def of(cls, text: str) -> _Source:
        tree = ast.parse(text)
        return cls(text, ast.dump(tree), _raises(tree), _names(tree))


@functools.cache
def _read(path: Path) -> _Source:
    return _Source.of(path.read_text("utf-8"))


def _raises(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.Raise) for node in ast.walk(tree))


def _names(tree: ast.AST) -> Counter[str]:
    """What a source defines and imports, and the parameters of its functions."""
    names: Counter[str] = Counter()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name):
                names[f"class {name}"] += 1
            case ast.FunctionDef(name=name, args=args) | ast.AsyncFunctionDef(name=name, args=args):
                parameters = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
                names[f"def {name}({', '.join(each.arg for each in parameters if each)})"] += 1
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update(f"import {alias.asname or alias.name}" for alias in aliases)
    return names
