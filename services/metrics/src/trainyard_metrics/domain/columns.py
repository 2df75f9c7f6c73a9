"""Points as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from trainyard_protos.v1.metrics_pb2 import AppendRequest

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """Points; all arrays have the same length. `name` and `writer` index tables kept beside it."""

    name: Ints
    writer: Ints
    rank: Ints
    seq: Ints
    step: Ints
    time_ns: Ints
    value: Floats

    def __len__(self) -> int:
        return len(self.value)

    def take(self, rows: Mask) -> Columns:
        """The points where `rows` is true."""
        return Columns(*(getattr(self, column.name)[rows] for column in fields(self)))


def join(parts: Sequence[Columns]) -> Columns:
    """All points of all parts, in order."""
    if not parts:
        nothing = np.empty(0, np.int64)
        return Columns(nothing, nothing, nothing, nothing, nothing, nothing, np.empty(0, np.float64))
    return Columns(*(np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(Columns)))


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


def decode(requests: Iterable[AppendRequest], names: Table, writers: Table) -> Iterator[Columns]:
    """The points of batches; batches of lines have none."""
    for request in requests:
        points = request.points
        size = len(points.value)
        if not size:
            continue
        local = np.array([names.index(name) for name in points.names], np.int64)
        yield Columns(
            name=local[np.fromiter(points.name, np.int64, size)],
            writer=np.full(size, writers.index(request.writer_id), np.int64),
            rank=np.full(size, points.rank, np.int64),
            seq=np.arange(request.first_seq, request.first_seq + size, dtype=np.int64),
            step=np.fromiter(points.step, np.int64, size),
            time_ns=np.fromiter(points.time_ns, np.int64, size),
            value=np.fromiter(points.value, np.float64, size),
        )
