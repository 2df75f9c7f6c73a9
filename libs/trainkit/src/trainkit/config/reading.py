"""YAML text to plain data, with the line of every value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from trainkit.config.problems import ConfigError, Path, Problem, written

MAX_VALUES = 10_000


@dataclass(slots=True)
class Tree:
    """What was read."""

    data: Any = None
    file: str = ""
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line_of(self, path: Path) -> int:
        """The line of the value at `path`, or of the nearest one around it; 0 when unknown."""
        around = (self.lines.get(path[:length], 0) for length in range(len(path), -1, -1))
        return next(filter(None, around), 0)


def read_yaml(text: str, file: str = "") -> Tree:
    """Reads one document.

    Raises:
        ConfigError: the text is no YAML, is empty, or has more than `MAX_VALUES` values.
    """
    reader = _Reader(file)
    try:
        root = reader.yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = f"not YAML: {error.problem or error.context}"
        raise ConfigError([Problem(file, mark.line + 1 if mark else 0, message=message)]) from None
    except YAMLError as error:
        raise ConfigError([Problem(file, message=f"not YAML: {error}")]) from None
    if root is None:
        raise ConfigError([Problem(file, message="is empty", allowed="a mapping of settings")])
    reader.tree.data = reader.value(root, ())
    return reader.tree


class _Reader:
    def __init__(self, file: str) -> None:
        self.yaml = YAML(typ="safe", pure=True)
        self.tree = Tree(file=file)
        self._values = 0

    def value(self, node: Node, path: Path) -> Any:
        self._values += 1
        if self._values > MAX_VALUES:
            raise ConfigError([self._problem(node, path[:1], f"has more than {MAX_VALUES} values")])
        self.tree.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.value(item, (*path, at)) for at, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                self.tree.problems.append(self._problem(key, path, "has a key that is no text"))
                continue
            below = (*path, str(key.value))
            if str(key.value) in entries:
                first = self.tree.lines[below]
                self.tree.problems.append(self._problem(key, below, f"was given already in line {first}"))
                continue
            self.tree.lines[below] = key.start_mark.line + 1
            entries[str(key.value)] = self.value(value, below)
        return entries

    def _scalar(self, node: Node, path: Path) -> Any:
        try:
            return self.yaml.constructor.construct_object(node)
        except (YAMLError, ValueError):
            raise ConfigError([self._problem(node, path, f"{node.tag} {node.value!r} is not supported")]) from None

    def _problem(self, node: Node, path: Path, message: str) -> Problem:
        return Problem(self.tree.file, node.start_mark.line + 1, written(path), message)
