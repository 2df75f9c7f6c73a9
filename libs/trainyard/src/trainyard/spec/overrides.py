"""Values that replace or extend those of a document: `--name`, `--set`, `--env` and extra arguments of a command.

They are applied to the document as it was read, before it is checked, so that one check finds every problem, at its
line of the file or at the option that it came with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainyard.spec.checking import Checker
from trainyard.spec.explain import kind_of
from trainyard.spec.loading import read
from trainyard.spec.model import TrainingJob
from trainyard.spec.problems import Path, Problem, SpecError, field_path
from trainyard.spec.yaml_reader import Unreadable, read_yaml

_PART = re.compile(
    r"""(?P<key>[^.\[\]=\s'"]+) | \[(?P<index>[0-9]{1,6})\] | \[(?P<quote>['"])(?P<quoted>[^'"]*)(?P=quote)\]""",
    re.VERBOSE,
)
_ALLOWED = "spec.FIELD=VALUE or metadata.FIELD=VALUE, as in spec.resources.cpu=2 or spec.inputs[0].path=data"
_COMMAND: Path = ("spec", "command")


@dataclass(frozen=True, slots=True)
class Override:
    """One value and where in the document it goes.

    Attributes:
        option: how problems name it; without its value, which may be a credential.
    """

    path: Path
    value: Any
    option: str


def overrides(
    *, name: str = "", assignments: Sequence[str] = (), env: Sequence[str] = (), arguments: Sequence[str] = ()
) -> list[Override]:
    """Reads what a command line says.

    Args:
        name: of the job.
        assignments: `spec.field=value`; values are YAML, so `2` is a number and `[a, b]` a list.
        env: `KEY=VALUE`; values are text.
        arguments: appended to `spec.command`.

    Raises:
        SpecError: an assignment has no such form.
    """
    problems: list[Problem] = []
    found: list[Override] = []
    if name:
        found.append(Override(("metadata", "name"), name, "--name"))
    for text in assignments:
        field, separator, value = text.partition("=")
        option = f"--set {field}"
        path = _path(field)
        if not separator or path is None:
            problems.append(Problem(file=option, message="not an assignment to a field", allowed=_ALLOWED))
            continue
        try:
            found.append(Override(path, read_yaml(value).data if value else "", option))
        except Unreadable as error:
            problems.append(Problem(file=option, field=field_path(path), message=error.message, allowed=error.allowed))
    for text in env:
        key, separator, value = text.partition("=")
        if not separator or not key:
            problems.append(Problem(file=f"--env {key}", message="not KEY=VALUE", allowed="KEY=VALUE, as in SEED=1"))
            continue
        found.append(Override(("spec", "env", key), value, f"--env {key}"))
    if problems:
        raise SpecError(problems)
    return [*found, *(Override(_COMMAND, argument, "--") for argument in arguments)]


def load_with(text: str, filename: str, changes: Sequence[Override]) -> TrainingJob:
    """Reads a document and applies overrides to it, in their order.

    Raises:
        SpecError: with every problem of the result; those of an override name its option in place of the file.
    """
    tree = read(text, filename)
    original = tree.data
    tree.data = json.loads(json.dumps(tree.data))  # what an alias shares is changed in one place alone
    for change in changes:
        tree.spelling.pop(change.path, None)
    problems = [problem for change in changes if (problem := _apply(tree.data, change)) is not None]
    if problems:
        raise SpecError(problems)
    checker = Checker(tree, filename)
    job = checker.check()
    if job is None:
        made = {change.option: _made(original, change.path) for change in changes}
        options = {field_path(change.path): change.option for change in changes if change.path != _COMMAND}
        raise SpecError([_at_its_option(problem, options, made) for problem in checker.problems])
    return job


def _made(original: Any, path: Path) -> list[str]:
    """The fields around a path that the document does not have."""
    made: list[str] = []
    place = original
    for depth, part in enumerate(path):
        if isinstance(place, dict):
            place = place.get(part)
        else:
            place = place[part] if isinstance(place, list) and isinstance(part, int) and part < len(place) else None
        if place is None:
            made.append(field_path(path[: depth + 1]))
    return made


def _path(field: str) -> Path | None:
    parts: list[str | int] = []
    position = 0
    while position < len(field):
        if parts and field[position] == ".":
            position += 1
        part = _PART.match(field, position)
        if part is None:
            return None
        parts.append(int(part["index"]) if part["index"] else part["key"] or part["quoted"] or "")
        position = part.end()
    return tuple(parts) if len(parts) > 1 and parts[0] in ("spec", "metadata") else None


def _apply(data: Any, change: Override) -> Problem | None:
    """Writes the value into the document; returns what keeps it from there."""
    if not isinstance(data, dict):
        return None  # which the check reports
    if change.path == _COMMAND and change.option == "--":
        return _append(data, change)
    *above, last = change.path
    place: Any = data
    for depth, part in enumerate(above):
        if isinstance(place, dict) and isinstance(part, str) and place.get(part) is None:
            place[part] = {}
        if not _has(place, part):
            return _nowhere(change, change.path[:depth], place, part)
        place = place[part]
    if isinstance(place, dict) and isinstance(last, str):
        place[last] = change.value
    elif isinstance(place, list) and isinstance(last, int) and last <= len(place):
        place[last : last + 1] = [change.value]
    else:
        return _nowhere(change, tuple(above), place, last)
    return None


def _append(data: dict[str, Any], change: Override) -> Problem | None:
    spec = data.get("spec")
    command = spec.get("command") if isinstance(spec, dict) else None
    if not isinstance(command, list):
        return None if command is not None else Problem(file="--", field="spec.command", message="there is no command")
    command.append(change.value)
    return None


def _has(place: Any, part: str | int) -> bool:
    if isinstance(part, str):
        return isinstance(place, dict)
    return isinstance(place, list) and part < len(place)


def _nowhere(change: Override, path: Path, place: Any, part: str | int) -> Problem:
    if isinstance(place, list):
        message = f"{field_path(path)} has {len(place)} items" if isinstance(part, int) else "expected an index"
        return Problem(
            file=change.option, field=field_path(change.path), message=message, allowed=field_path((*path, 0))
        )
    return Problem(file=change.option, field=field_path(change.path), message=f"{field_path(path)} is {kind_of(place)}")


def _at_its_option(problem: Problem, options: Mapping[str, str], made: Mapping[str, Sequence[str]]) -> Problem:
    """A problem of a value that an option gave, or of a key that only an option wrote, names that option."""
    for field, option in options.items():
        below = (f"{field}.", f"{field}[")
        if problem.field == field or problem.field.startswith(below) or problem.field in made.get(option, ()):
            return replace(problem, file=option, line=0)
    return problem
