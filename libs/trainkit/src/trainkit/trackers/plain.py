"""Nested settings as flat names, for trackers that know only those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"optimizer": {"lr": 0.1}}` as `{"optimizer.lr": 0.1}`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
