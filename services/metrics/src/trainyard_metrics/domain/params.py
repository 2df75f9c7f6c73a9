"""Parameters as a search sees them: one text, and where it is one a number, per dotted key."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MAX_KEY = 256


@dataclass(frozen=True, slots=True)
class Param:
    """One value. `number` is None for what is not a number, and for NaN."""

    key: str
    text: str
    number: float | None = None


def flatten(params: Mapping[str, object]) -> list[Param]:
    """Values by key: members of objects and lists are reached through dots; nulls and empty ones are left out."""
    found = {param.key: param for key, value in params.items() for param in _walk(key, value)}
    return list(found.values())


def _walk(key: str, value: object) -> Iterator[Param]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _walk(f"{key}.{index}", inner)
    elif value is not None:
        yield Param(storable(key)[:MAX_KEY], *_scalar(value))


def _scalar(value: object) -> tuple[str, float | None]:
    if isinstance(value, str):
        return storable(value), None
    text = json.dumps(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text, None
    try:
        number = float(value)
    except OverflowError:
        return text, None
    return text, None if math.isnan(number) else number


def storable(text: str) -> str:
    """Text as every database takes it: no NUL, no half of a character."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
