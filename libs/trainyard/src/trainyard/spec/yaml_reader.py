"""YAML text to plain data that JSON could hold, with the line and the spelling of every value.

The parser's events are read one by one instead of composing a tree first, so that a document can be refused as soon as
it is too deep or too large, whatever follows. Scalars are those of YAML 1.2's core schema, minus what JSON lacks: dates
and the like are texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)
from ruamel.yaml.reader import ReaderError

from trainyard.spec.problems import Path

MAX_DEPTH = 32
MAX_VALUES = 10_000

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_LONGEST_NUMBER = 100
_TEXT_TAG = "tag:yaml.org,2002:str"
_MERGE = "<<"


class Unreadable(Exception):
    """The text is no document at all. `syntax`: already for YAML's grammar, not for a rule of ours."""

    def __init__(
        self, line: int, message: str, *, value: str = "", allowed: str = "", path: Path = (), syntax: bool = False
    ) -> None:
        super().__init__(message)
        self.line, self.message, self.value, self.allowed, self.path = line, message, value, allowed, path
        self.syntax = syntax


@dataclass(slots=True)
class Tree:
    """What was read. Lines count from 1; `spelling` is how a plain scalar was written, where that may matter."""

    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    spelling: dict[Path, str] = field(default_factory=dict)
    doubled: list[tuple[Path, int, int]] = field(default_factory=list)  # path, line, line of the first

    def line_of(self, path: Path) -> int:
        """The line of the value at `path`, or of the nearest value around it; 0 when unknown."""
        for length in range(len(path), -1, -1):
            if line := self.lines.get(path[:length], 0):
                return line
        return 0


def read_yaml(text: str) -> Tree:
    """Reads one document.

    Raises:
        Unreadable: the text is no YAML, has several documents, or is too deep or too large.
    """
    try:
        return _Reader(text).read()
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"not a text file: it has the character {chr(error.character)!r}"
        raise Unreadable(line, message, allowed="YAML or JSON in UTF-8", syntax=True) from None
    except MarkedYAMLError as error:
        raise _explain(error, text) from None
    except YAMLError as error:
        raise Unreadable(0, f"not YAML: {error}", syntax=True) from None


def scalar(text: str) -> Any:
    """A plain (unquoted) scalar's value in the core schema."""
    if text in _NULL:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text


@dataclass(slots=True)
class _Anchored:
    value: Any
    size: int
    open: bool


class _Reader:
    def __init__(self, text: str) -> None:
        self.events: Iterator[Any] = iter(YAML(typ="safe", pure=True).parse(text))
        self.tree = Tree()
        self.anchors: dict[str, _Anchored] = {}
        self.values = 0

    def read(self) -> Tree:
        event = self._next_content()
        if isinstance(event, StreamEndEvent):
            return self.tree
        self.tree.lines[()] = _line(event)
        self.tree.data = self._value(event, ())
        self._refuse_more()
        return self.tree

    def _next_content(self) -> Any:
        for event in self.events:
            if isinstance(event, (NodeEvent, StreamEndEvent)):
                return event
        raise Unreadable(0, "the document ends too early")

    def _refuse_more(self) -> None:
        started = 0
        for event in self.events:
            if isinstance(event, DocumentStartEvent):
                started = _line(event)
            elif isinstance(event, ScalarEvent) and not event.value and event.style is None:
                continue  # what a trailing `---` opens
            elif isinstance(event, NodeEvent):
                raise Unreadable(started or _line(event), "a second document begins here", allowed="one job per file")

    def _value(self, event: NodeEvent, path: Path) -> Any:
        self._count(event, path)
        if isinstance(event, AliasEvent):
            return self._alias(event, path)
        anchored = _Anchored(None, self.values, open=True)
        if event.anchor:
            self.anchors[event.anchor] = anchored
        if isinstance(event, ScalarEvent):
            anchored.value = self._scalar(event, path)
        elif isinstance(event, SequenceStartEvent):
            _refuse_tag(event, "seq", path)
            anchored.value = self._sequence(path)
        else:
            _refuse_tag(event, "map", path)
            anchored.value = self._mapping(path)
        anchored.size, anchored.open = self.values - anchored.size + 1, False
        return anchored.value

    def _count(self, event: Event, path: Path, more: int = 1) -> None:
        self.values += more
        if self.values > MAX_VALUES:
            raise Unreadable(
                _line(event), f"has more than {MAX_VALUES} values", allowed="a smaller document", path=path[:2]
            )
        if len(path) > MAX_DEPTH:
            raise Unreadable(
                _line(event), f"nested more than {MAX_DEPTH} deep", allowed="a flatter document", path=path[:2]
            )

    def _alias(self, event: AliasEvent, path: Path) -> Any:
        anchored = self.anchors.get(event.anchor)
        if anchored is None:
            raise Unreadable(
                _line(event), f"*{event.anchor} stands for nothing", allowed=f"an &{event.anchor} before it", path=path
            )
        if anchored.open:
            raise Unreadable(
                _line(event), f"*{event.anchor} contains itself", allowed="an alias of something complete", path=path
            )
        self._count(event, path, anchored.size)
        return anchored.value

    def _scalar(self, event: ScalarEvent, path: Path) -> Any:
        if event.style is not None or _tag(event) in ("!", _TEXT_TAG):
            return event.value
        _refuse_tag(event, "", path)
        value = scalar(event.value)
        if not isinstance(value, str):
            self.tree.spelling[path] = event.value
        return value

    def _sequence(self, path: Path) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), SequenceEndEvent):
            below = (*path, len(items))
            self.tree.lines[below] = _line(event)
            items.append(self._value(event, below))
        return items

    def _mapping(self, path: Path) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        while not isinstance(event := next(self.events), MappingEndEvent):
            key = self._key(event, path)
            below = (*path, key)
            value_event = next(self.events)
            if key == _MERGE:
                merged = _merge(self._value(value_event, below), merged, event)
            elif key in entries:
                self.tree.doubled.append((below, _line(event), self.tree.lines[below]))
                self._value(value_event, (*path, key, "(second)"))
            else:
                self.tree.lines[below] = _line(event)
                entries[key] = self._value(value_event, below)
        return {**merged, **entries} if merged else entries

    def _key(self, event: Event, path: Path) -> str:
        self._count(event, path)
        if not isinstance(event, ScalarEvent):
            raise Unreadable(_line(event), "a key has to be a text", allowed="key: value", path=path)
        return str(event.value)


def _merge(value: Any, merged: dict[str, Any], event: Event) -> dict[str, Any]:
    sources = value if isinstance(value, list) else [value]
    if not all(isinstance(source, dict) for source in sources):
        raise Unreadable(_line(event), "<< takes in mappings", allowed="<<: *anchor of a mapping")
    for source in sources:
        merged = {**source, **merged}
    return merged


def _line(event: Event) -> int:
    return int(event.start_mark.line) + 1


def _tag(event: Any) -> str:
    return str(event.tag or "")


def _refuse_tag(event: Event, kind: str, path: Path) -> None:
    tag = _tag(event)
    if tag and tag != f"tag:yaml.org,2002:{kind}":
        short = tag.replace("tag:yaml.org,2002:", "!!")
        raise Unreadable(
            _line(event), f"the tag {short} is not supported", value=short, allowed="plain values", path=path
        )


def _explain(error: MarkedYAMLError, text: str) -> Unreadable:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
    written = text.splitlines()[line - 1] if 0 < line <= len(text.splitlines()) else ""
    if "\t" in written[: max(column, len(written) - len(written.lstrip()))]:
        return Unreadable(
            line,
            f"a tab at column {written.index(chr(9)) + 1}",
            value=written.strip()[:100],
            allowed="spaces: YAML is not indented with tabs",
            syntax=True,
        )
    reason = str(error.problem or error.context or "syntax error")
    return Unreadable(
        line, f"not YAML: {reason} (column {column})", value=written.strip()[:100], allowed="YAML or JSON", syntax=True
    )
