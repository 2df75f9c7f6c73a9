"""Batches of records: counting, checking, trimming what is stored already."""

from __future__ import annotations

import re
from collections.abc import Callable

from servicekit.errors import InvalidArgument
from trainyard_protos.v1.metrics_pb2 import AppendRequest, Points

REFUSED = "trainyard/refused"
"""Where points go whose name is not allowed or beyond the run's limit: their number, steps and values stay visible."""

_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
_MAX_WRITER = 128


def count(request: AppendRequest) -> int:
    """Records in a batch."""
    if request.HasField("lines"):
        return len(request.lines.lines)
    return len(request.points.value)


def check(request: AppendRequest) -> None:
    """Refuses a batch that contradicts itself.

    Raises:
        InvalidArgument: BadBatch.
    """
    if not 0 < len(request.writer_id) <= _MAX_WRITER:
        raise _bad(f"a writer id of {len(request.writer_id)} characters", f"use 1 to {_MAX_WRITER}")
    if request.HasField("points"):
        _check_points(request.points)


def _check_points(points: Points) -> None:
    lengths = {
        "name": len(points.name),
        "step": len(points.step),
        "time_ns": len(points.time_ns),
        "value": len(points.value),
    }
    if len(set(lengths.values())) > 1:
        described = ", ".join(f"{column} {length}" for column, length in lengths.items())
        raise _bad(f"columns of different lengths: {described}", "give every point a name, step, time and value")
    if points.name and max(points.name) >= len(points.names):
        raise _bad(
            f"name index {max(points.name)} with {len(points.names)} names",
            "index the table of names of the same batch",
        )


def skip(request: AppendRequest, stored: int) -> None:
    """Takes the first `stored` records out of a batch: the store has them."""
    if request.HasField("lines"):
        del request.lines.lines[:stored]
    else:
        for column in (request.points.name, request.points.step, request.points.time_ns, request.points.value):
            del column[:stored]
    request.first_seq += stored


def refuse_names(points: Points, allowed: Callable[[str], bool]) -> list[str]:
    """Renames what is not allowed to `REFUSED`, so that its writer goes on; returns the names refused."""
    refused = []
    for index, name in enumerate(points.names):
        if not (_NAME.fullmatch(name) and allowed(name)):
            refused.append(name)
            points.names[index] = REFUSED
    return refused


def _bad(message: str, hint: str) -> InvalidArgument:
    return InvalidArgument(message, reason="BadBatch", hint=hint)
