"""Batches of records: counting, checking, trimming what is stored already.

Nothing here looks at single points: a batch's rows are columns, and columns are checked and cut as arrays.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from servicekit.errors import InvalidArgument
from trainyard_protos.v1.metrics_pb2 import AppendRequest, Block, Rows

from trainyard_metrics.domain.columns import arrays

REFUSED = "trainyard/refused"
"""Where points go whose name is not allowed or beyond the run's limit: their number, steps and values stay visible."""

_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
_MAX_WRITER = 128
_MAX_POSITION = 2**63 - 1
# Empty lines and names without rows take no room in a message, but do in the index.
_MAX_LINES = 65_536
_MAX_NAMES = 16_384  # each costs the event loop some 10 us


def count(request: AppendRequest) -> int:
    """Records in a batch: rows, or lines."""
    if request.HasField("lines"):
        return len(request.lines.lines)
    return request.rows.count


def count_points(rows: Rows) -> int:
    """Values in all blocks."""
    return sum(len(block.value) for block in rows.blocks) // 8


def check(request: AppendRequest) -> None:
    """Refuses a batch that contradicts itself.

    Raises:
        InvalidArgument: BadBatch.
    """
    if not 0 < len(request.writer_id) <= _MAX_WRITER:
        raise _bad(f"a writer id of {len(request.writer_id)} characters", f"use 1 to {_MAX_WRITER}")
    if request.HasField("rows"):
        _check_rows(request.rows)
    if len(request.lines.lines) > _MAX_LINES:
        raise _bad(f"{len(request.lines.lines):,} lines", f"send at most {_MAX_LINES:,} at a time")
    if request.first_seq + count(request) > _MAX_POSITION:
        raise _bad(f"records numbered from {request.first_seq}", "number a writer's records from 0")


def _check_rows(rows: Rows) -> None:
    names = sum(len(block.names) for block in rows.blocks)
    if names > _MAX_NAMES:
        raise _bad(f"{names:,} names in {len(rows.blocks):,} blocks", f"send at most {_MAX_NAMES:,} at a time")
    for index, block in enumerate(rows.blocks):
        _check_block(index, block, alone=len(rows.blocks) == 1)
    total = sum(len(block.step) for block in rows.blocks) // 8
    if total != rows.count:
        raise _bad(f"{rows.count:,} rows announced and {total:,} in the blocks", "count the rows of all blocks")
    if rows.blocks and (len(rows.blocks) > 1 or rows.blocks[0].row):
        _check_numbers(rows)


def _check_block(index: int, block: Block, *, alone: bool) -> None:
    size = len(block.step) // 8
    expected = {"step": 8 * size, "time_ns": 8 * size, "value": 8 * size * len(block.names)}
    if block.row or not alone:
        expected["row"] = 4 * size
    found = {column: len(getattr(block, column)) for column in expected}
    if not size or found != expected:
        described = ", ".join(f"{column} {length:,}" for column, length in found.items())
        raise _bad(
            f"block {index} of {len(block.names):,} names has columns of {described} bytes",
            "give every row a number (4 bytes), a step and a time (8 each), and a value (8) for every name",
        )
    if len(set(block.names)) != len(block.names):
        raise _bad(f"block {index} has a name twice", "give every name one column")


def _check_numbers(rows: Rows) -> None:
    numbers = [np.frombuffer(block.row, "<u4") for block in rows.blocks]
    if any(np.any(column[1:] <= column[:-1]) for column in numbers):
        raise _bad("rows of a block that do not ascend", "order the rows of each block by their number")
    ordered = np.sort(np.concatenate(numbers))
    if not np.array_equal(ordered, np.arange(rows.count)):
        raise _bad(
            f"the numbers of {rows.count:,} rows are not 0 to {rows.count - 1}", "put every row into exactly one block"
        )


def skip(request: AppendRequest, stored: int) -> None:
    """Takes the first `stored` records out of a batch: the store has them."""
    if not stored:
        return
    if request.HasField("lines"):
        del request.lines.lines[:stored]
    else:
        _skip_rows(request.rows, stored)
    request.first_seq += stored


def _skip_rows(rows: Rows, stored: int) -> None:
    left = []
    for block in rows.blocks:
        step, time_ns, row, value = arrays(block)
        first = int(np.searchsorted(row, stored))
        if first < len(row):
            left.append(
                Block(
                    names=block.names,
                    row=(row[first:] - np.uint32(stored)).tobytes() if block.row else b"",
                    step=step[first:].tobytes(),
                    time_ns=time_ns[first:].tobytes(),
                    value=value[:, first:].tobytes(),
                )
            )
    del rows.blocks[:]
    rows.blocks.extend(left)
    rows.count -= stored


def refuse_names(rows: Rows, allowed: Callable[[str], bool]) -> dict[str, int]:
    """Renames what is not allowed to `REFUSED`, so that its writer goes on.

    A block may have several columns of that name afterwards. Returns the names refused, each with its points.
    """
    refused: dict[str, int] = {}
    for block in rows.blocks:
        for index, name in enumerate(block.names):
            if not allowed(name):
                refused[name] = refused.get(name, 0) + len(block.step) // 8
                block.names[index] = REFUSED
    return refused


def is_name(name: str) -> bool:
    """Whether a series may have this name: 1 to 256 characters that can be shown."""
    return _NAME.fullmatch(name) is not None


def _bad(message: str, hint: str) -> InvalidArgument:
    return InvalidArgument(message, reason="BadBatch", hint=hint)
