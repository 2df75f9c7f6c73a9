"""State between two steps, and the files that hold its plain part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHARED = "state.json"


@dataclass(frozen=True)
class Snapshot:
    """State between two steps.

    Args:
        step: of the run.
        shared: what is the same, or sharded, on every process.
        own: what only this process has.
        results: of the last evaluation, for the rule of the best checkpoint.
        logged_until: the time after the last row that trackers got, in seconds since 1970; None when there was none.
    """

    step: int
    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    results: Mapping[str, float]
    logged_until: float | None = None


def own_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"
