"""Plain data to YAML that people read: blocks, with lists of scalars on one line.

What is not safely a plain text is written as in JSON, which is YAML too. So nothing depends on which version of YAML a
reader follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# Begins with a letter, a path, an option or a number with a unit, and has no character that means something in YAML.
_PLAIN = re.compile(r"([A-Za-z./]|--?[A-Za-z]|[0-9]+[A-Za-z]+\Z)[A-Za-z0-9_./+@-]*( [A-Za-z0-9_./+@-]+)*")
# What some version of YAML reads as another value than a text.
_TAKEN = re.compile(
    r"(null|true|false|yes|no|on|off|y|n|-?\.inf|\.nan|\.\.\.|0x[0-9a-f]+|-?[0-9.]*[0-9][0-9.]*([eE][-+]?[0-9]+)?)",
    re.IGNORECASE,
)


def to_yaml(data: dict[str, Any]) -> str:
    """The document as YAML text, keys in their order."""
    return "".join(f"{line}\n" for line in _lines(data))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _entry(f"{_scalar(key)}:", below)
    else:
        for below in value:
            first, *rest = _inline_or_lines(below)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)


def _entry(head: str, value: Any) -> Iterator[str]:
    if _is_short(value):
        yield f"{head} {_flow(value)}"
    else:
        yield head
        yield from (f"  {line}" for line in _lines(value))


def _inline_or_lines(value: Any) -> list[str]:
    return [_flow(value)] if _is_short(value) else list(_lines(value))


def _is_short(value: Any) -> bool:
    """Whether a value stays on one line: scalars, lists of them, and what is empty."""
    return (
        not isinstance(value, (dict, list))
        or not value
        or (isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in value))
    )


def _flow(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    return "{}" if value == {} else _scalar(value)


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and not _TAKEN.fullmatch(value):
        return value
    return "".join(_escaped(character) for character in json.dumps(value, ensure_ascii=False))


def _escaped(character: str) -> str:
    if character == " " or character.isprintable():
        return character
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"
