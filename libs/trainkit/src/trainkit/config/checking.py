"""Plain data to an object of a dataclass, or to everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from trainkit.catalogue import nearest
from trainkit.config.components import REFUSED
from trainkit.config.problems import ConfigError, Path, Problem, written
from trainkit.config.reading import Tree, read_yaml
from trainkit.config.schema import Schema, at, describe, kinds, known_keys, schema

T = TypeVar("T")


def load(file: str | FilePath, type_: type[T]) -> T:
    """Reads a file in YAML (or JSON).

    Args:
        file: its path.
        type_: a dataclass; its fields may be dataclasses, lists, mappings, `Literal`s, unions and `Component`s.

    Raises:
        ConfigError: with every problem of the file at once: line, field, what is allowed, the nearest spelling.
    """
    try:
        text = FilePath(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
        raise ConfigError([Problem(str(file), message=f"cannot be read: {reason}")]) from None
    return parse(text, type_, str(file))


def parse(text: str, type_: type[T], file: str = "") -> T:
    """As `load`, from a text; `file` is how problems call it."""
    return _checked(read_yaml(text, file), type_)


def from_dict(data: Mapping[str, Any], type_: type[T]) -> T:
    """As `load`, from plain data."""
    return _checked(Tree(data), type_)


def _checked(tree: Tree, type_: type[T]) -> T:
    root = schema(type_)
    mistaken = list(_mistaken(tree, root))
    try:
        value = TypeAdapter(type_).validate_python(tree.data, extra="forbid")
    except ValidationError as error:
        explained = list(_explained(error.errors(), tree, root))
        told = {each.field for each in explained}
        more = [each for each in mistaken if each.field not in told]
        raise ConfigError([*tree.problems, *explained, *more]) from None
    if tree.problems or mistaken:
        raise ConfigError([*tree.problems, *mistaken])
    return value


def _mistaken(tree: Tree, root: Schema) -> Iterator[Problem]:
    """Truth values in the place of numbers, and the other way round: pydantic would take `true` for 1."""
    for path, value in _values(tree.data, ()):
        wanted = at(root, path)
        allowed = kinds(wanted)
        fits = "boolean" in allowed if isinstance(value, bool) else not allowed <= {"boolean", "null"}
        if allowed and not fits:
            yield Problem(tree.file, tree.line_of(path), written(path), f"is {value!r}", describe(wanted))


def _values(data: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(data, Mapping | list):
        for key, below in data.items() if isinstance(data, Mapping) else enumerate(data):
            yield from _values(below, (*path, key))
    elif isinstance(data, bool | int | float | str):
        yield path, data


def _explained(errors: list[ErrorDetails], tree: Tree, root: Schema) -> Iterator[Problem]:
    """One problem for each place. Where a union's branches all refuse a value, the deepest complaints count."""
    places = {_path(error["loc"], tree.data): error for error in reversed(errors)}
    for path, error in reversed(places.items()):
        deeper = any(len(other) > len(path) and other[: len(path)] == path for other in places)
        if not deeper or error["type"] == REFUSED:
            yield from _problems(error, path, tree, root)


def _path(location: tuple[int | str, ...], data: Any) -> Path:
    """The place in the data: pydantic's location without its names for the branches of a union."""
    path: list[str | int] = []
    for depth, part in enumerate(location):
        inside = isinstance(data, Mapping) and part in data
        inside = inside or (isinstance(data, list) and isinstance(part, int) and part < len(data))
        missing = isinstance(data, Mapping) and depth == len(location) - 1 and str(part).isidentifier()
        if inside:
            data = data[part]
            path.append(part)
        elif missing:
            path.append(part)
    return tuple(path)


def _problems(error: ErrorDetails, path: Path, tree: Tree, root: Schema) -> Iterator[Problem]:
    for below, message, allowed, suggestion in _words(error, path, root):
        place = (*path, *below)
        yield Problem(tree.file, tree.line_of(place), written(place), message, allowed, suggestion)


_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")


def _words(error: ErrorDetails, path: Path, root: Schema) -> list[tuple[Path, str, str, str]]:
    kind, value = error["type"], error["input"]
    if kind == REFUSED:
        return list(error["ctx"]["problems"])
    if kind in _UNKNOWN:
        known = known_keys(at(root, path[:-1]))
        return [((), "unknown key", ", ".join(known), nearest(str(path[-1]), known))]
    if kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return [((), "is required", describe(at(root, path)), "")]
    if kind in ("value_error", "assertion_error"):
        return [((), str(error["ctx"]["error"]), "", "")]
    wanted = at(root, path)
    words = wanted.get("enum", [])
    return [((), f"is {value!r}", describe(wanted), nearest(str(value), map(str, words)))]
