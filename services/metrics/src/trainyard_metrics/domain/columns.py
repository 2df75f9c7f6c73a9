"""Points as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from trainyard_protos.v1.metrics_pb2 import AppendRequest, Block

Ints = NDArray[np.int64]
Indexes = NDArray[np.int32]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

_ARRAYS = ("name", "rank", "writer", "row", "step", "time_ns", "value")


@dataclass(frozen=True)
class Columns:
    """Points; all arrays have the same length. Values are kept bit by bit.

    Attributes:
        names: table of names, each once.
        writers: table of writer ids, each once.
        name: int32, index into `names`.
        rank: int32; -1 is the agent.
        writer: int32, index into `writers`.
        row: int64, number of the row among the writer's.
        step: int64.
        time_ns: int64, nanoseconds since 1970 UTC.
        value: float64.
    """

    names: tuple[str, ...]
    writers: tuple[str, ...]
    name: Indexes
    rank: Indexes
    writer: Indexes
    row: Ints
    step: Ints
    time_ns: Ints
    value: Floats

    def __len__(self) -> int:
        return len(self.value)

    @cached_property
    def nbytes(self) -> int:
        """Memory the arrays take."""
        return sum(int(getattr(self, array).nbytes) for array in _ARRAYS)

    def take(self, rows: Mask | Ints | slice) -> Columns:
        """Some of the points, by the same tables."""
        return replace(self, **{array: getattr(self, array)[rows] for array in _ARRAYS})


def empty() -> Columns:
    """No points."""
    index, number = np.empty(0, np.int32), np.empty(0, np.int64)
    return Columns((), (), index, index, index, number, number, number, np.empty(0, np.float64))


def join(parts: Sequence[Columns]) -> Columns:
    """All points of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return empty()
    names, writers = Table(), Table()
    name = np.concatenate([names.translate(part.names)[part.name] for part in parts])
    writer = np.concatenate([writers.translate(part.writers)[part.writer] for part in parts])
    rest = {
        array: np.concatenate([getattr(part, array) for part in parts])
        for array in _ARRAYS
        if array not in ("name", "writer")
    }
    return Columns(tuple(names.values), tuple(writers.values), name=name, writer=writer, **rest)


class Table:
    """Strings by the order in which they were met."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._indexes: dict[str, int] = {}

    def index(self, value: str) -> int:
        """The index of a string, which is added when it is new."""
        found = self._indexes.get(value)
        if found is None:
            found = self._indexes[value] = len(self.values)
            self.values.append(value)
        return found

    def translate(self, values: Iterable[str]) -> Indexes:
        """The indexes of several strings."""
        return np.fromiter((self.index(value) for value in values), np.int32)


def decode(
    requests: Iterable[AppendRequest],
    wanted: Callable[[str], bool] | None = None,
    ranks: frozenset[int] | None = None,
) -> Iterator[Columns]:
    """The points of batches, block by block; batches of lines have none.

    Args:
        wanted: which names; None: all.
        ranks: which ranks; None: all.
    """
    for request in requests:
        if not request.HasField("rows") or (ranks is not None and request.rows.rank not in ranks):
            continue
        for block in request.rows.blocks:
            chosen = [i for i, name in enumerate(block.names) if wanted is None or wanted(name)]
            if chosen:
                yield _columns(request, block, chosen)


def _columns(request: AppendRequest, block: Block, chosen: list[int]) -> Columns:
    step, time_ns, row, value = arrays(block)
    rows, series = len(step), len(chosen)
    names = Table()
    size = rows * series
    return Columns(
        name=np.repeat(names.translate(block.names[index] for index in chosen), rows),
        names=tuple(names.values),
        writers=(request.writer_id,),
        rank=np.full(size, request.rows.rank, np.int32),
        writer=np.zeros(size, np.int32),
        row=np.tile(row.astype(np.int64) + request.first_seq, series),
        step=np.tile(step, series),
        time_ns=np.tile(time_ns, series),
        value=(value if series == len(block.names) else value[chosen]).ravel(),
    )


def arrays(block: Block) -> tuple[Ints, Ints, NDArray[np.uint32], Floats]:
    """Views of a block's columns: step (k), time_ns (k), row (k), value (n, k)."""
    step = np.frombuffer(block.step, "<i8")
    row = np.frombuffer(block.row, "<u4") if block.row else np.arange(len(step), dtype=np.uint32)
    value = np.frombuffer(block.value, "<f8").reshape(len(block.names), len(step))
    return step, np.frombuffer(block.time_ns, "<i8"), row, value
