"""What pydantic found wrong, said so that the writer of the document knows what to do."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic_core import ErrorDetails

from trainyard.spec import schema
from trainyard.spec.checks import REFUSED
from trainyard.spec.commands import as_list
from trainyard.spec.fields import PATTERN_WORDS
from trainyard.spec.problems import Path

Finding = tuple[Path, str, str, str]
"""Path, message, what is allowed, suggestion."""

_KINDS = {
    dict: "a mapping",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number with a fraction",
}


def explain(error: ErrorDetails, spelling: str | None) -> list[Finding]:
    """What one error of pydantic's means. `spelling` is how the document wrote the value, when that is known."""
    path = tuple(part for part in error["loc"] if part != _KEY)
    if error["type"] == REFUSED:
        return [((*path, *at), *words) for at, *words in error["ctx"]["complaints"]]
    return [_explain(error["type"], path, error["input"], spelling)]


def _explain(type_: str, path: Path, value: Any, spelling: str | None) -> Finding:
    if type_ == "extra_forbidden":
        return _unknown_key(path)
    allowed = describe(schema.at(path))
    if type_ == "literal_error":
        return path, "not one of the values", allowed, nearest(str(value), (schema.at(path) or {}).get("enum", ()))
    if type_ == "string_pattern_mismatch":
        return path, "not of the right form", allowed, _nearest_name(path, value)
    if type_ in _WORDS:
        return path, _WORDS[type_], allowed, ""
    return path, f"is {kind_of(value)}", allowed, _as_expected(path, value, spelling)


_KEY = "[key]"  # pydantic's mark of a mapping's key
MISSING = "is required"
UNKNOWN = "unknown key"
TOO_FEW = "has too few entries"
_WORDS = {
    "missing": MISSING,
    "greater_than_equal": "too small",
    "less_than_equal": "too large",
    "too_short": TOO_FEW,
    "too_long": "has too many entries",
    "string_too_short": "is empty",
    "string_too_long": "is too long",
}


def kind_of(value: Any) -> str:
    """A value's kind in words."""
    return "empty" if value is None else _KINDS.get(type(value), type(value).__name__)


def describe(node: schema.Schema | None) -> str:
    """What a schema allows, in words."""
    if node is None:
        return ""
    if "enum" in node:
        return ", ".join(map(str, node["enum"]))
    if "pattern" in node:
        return (
            PATTERN_WORDS[node["pattern"]] if node["pattern"] in PATTERN_WORDS else f"a text matching {node['pattern']}"
        )
    kind = node.get("type")
    if kind == "integer":
        return f"a whole number from {node['minimum']} to {node['maximum']}"
    if kind == "string":
        return "a text"
    if kind == "boolean":
        return "true or false"
    if kind == "array":
        return "a list of mappings" if "properties" in node["items"] else f"a list, each item {describe(node['items'])}"
    if "properties" in node:
        return f"a mapping with {', '.join(node['properties'])}" if node["properties"] else "{}"
    return "a mapping of texts"


def _unknown_key(path: Path) -> Finding:
    known = list((schema.at(path[:-1]) or {}).get("properties", ()))
    key = str(path[-1])
    return path, UNKNOWN, ", ".join(known), nearest(key, known) or _elsewhere(key)


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant, or nothing. Case, `-` and `_` do not count."""
    plain = {_plain(name): name for name in known}
    found = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=0.6)
    return plain[found[0]] if found else ""


def _plain(word: str) -> str:
    return re.sub(r"[-_ ]", "", word).lower()


def _elsewhere(key: str) -> str:
    found = [path for path in _known_paths(schema.closed_schema(), "") if path.rpartition(".")[2] == key]
    return min(found, key=len) if found else ""


def _known_paths(node: schema.Schema, prefix: str) -> Iterator[str]:
    for name, below in node.get("properties", {}).items():
        yield f"{prefix}{name}"
        yield from _known_paths(below, f"{prefix}{name}.")
        if "items" in below:
            yield from _known_paths(below["items"], f"{prefix}{name}[].")


def _nearest_name(path: Path, value: str) -> str:
    pattern = str((schema.at(path) or {}).get("pattern", ""))
    for attempt in (
        re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-"),
        re.sub(r"[^A-Za-z0-9]+", "_", value).strip("_"),
    ):
        if attempt and pattern and re.fullmatch(pattern, attempt):
            return attempt
    return ""


def _as_expected(path: Path, value: Any, spelling: str | None) -> str:
    """The value, written as the kind that is expected."""
    node = schema.at(path) or {}
    kind = node.get("type")
    written = spelling if spelling is not None else json.dumps(value)
    if kind == "string" and not isinstance(value, (dict, list)):
        return nearest(str(value), node["enum"]) if "enum" in node else f'"{written}"'
    if kind == "integer" and isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value.strip()):
        return value.strip()
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return str(int(value))
    if kind == "array" and isinstance(value, str) and node["items"].get("type") == "string":
        return as_list(value)
    if kind == "array" and node["items"].get("type") == "integer" and isinstance(value, int):
        return f"[{written}]"
    return ""
