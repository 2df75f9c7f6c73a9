"""Batches turned into series: columns of the same shape are put together before anything looks at them.

The cost is per block, never per point, and small for blocks of a single row as well: bytes are collected first and
become arrays once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from trainyard_protos.v1.metrics_pb2 import AppendRequest, Block

from trainyard_metrics.domain.columns import Columns, Floats, Ints, Mask, Table, empty


class Key(NamedTuple):
    """What makes a series of one writer; the order in which column files are sorted, before the row."""

    name: str
    rank: int
    writer: str


class Chunk(NamedTuple):
    """Points of one series of one writer, by ascending row."""

    key: Key
    row: Ints
    step: Ints
    time_ns: Ints
    value: Floats

    def take(self, rows: Mask | Ints | slice) -> Chunk:
        """Some of the points."""
        return Chunk(self.key, self.row[rows], self.step[rows], self.time_ns[rows], self.value[rows])


class Gatherer:
    """Collects batches.

    Args:
        wanted: which names; None: all.
        ranks: which ranks; None: all.
        after: the first row wanted of each writer; 0 for those it lacks.
    """

    def __init__(
        self,
        wanted: Callable[[str], bool] | None = None,
        ranks: frozenset[int] | None = None,
        after: Mapping[str, int] | None = None,
    ) -> None:
        self._wanted = wanted or (lambda name: True)
        self._ranks = ranks
        self._after = after or {}
        self._shapes: dict[tuple[str, int, tuple[str, ...]], _Shape] = {}

    def add(self, request: AppendRequest) -> None:
        """Takes the points of a batch; one of lines has none."""
        rows = request.rows
        if self._ranks is not None and rows.rank not in self._ranks:
            return
        if request.first_seq + rows.count <= self._after.get(request.writer_id, 0):
            return
        for block in rows.blocks:
            names = tuple(block.names)
            shape = self._shapes.get((request.writer_id, rows.rank, names))
            if shape is None:
                chosen = [index for index, name in enumerate(names) if self._wanted(name)]
                shape = self._shapes[request.writer_id, rows.rank, names] = _Shape(chosen)
            shape.add(request.first_seq, block)

    def chunks(self) -> list[Chunk]:
        """One per series and writer, ordered by key."""
        found = [
            chunk
            for (writer, rank, names), shape in self._shapes.items()
            for chunk in shape.chunks(names, rank, writer, self._after.get(writer, 0))
        ]
        found.sort(key=lambda chunk: chunk.key)
        return [_merge(list(same)) for _, same in groupby(found, key=lambda chunk: chunk.key)]


class _Shape:
    """Blocks of the same names of one writer."""

    def __init__(self, chosen: Sequence[int]) -> None:
        self._chosen = chosen
        self._firsts: list[int] = []
        self._counts: list[int] = []
        self._row: list[bytes] = []
        self._step: list[bytes] = []
        self._time_ns: list[bytes] = []
        self._values: list[list[bytes]] = [[] for _ in chosen]

    def add(self, first_seq: int, block: Block) -> None:
        if not self._chosen:
            return
        step, value = block.step, block.value
        size = len(step)
        self._firsts.append(first_seq)
        self._counts.append(size // 8)
        self._row.append(block.row or np.arange(size // 8, dtype="<u4").tobytes())
        self._step.append(step)
        self._time_ns.append(block.time_ns)
        for kept, index in zip(self._values, self._chosen, strict=True):
            kept.append(value[index * size : (index + 1) * size])

    def chunks(self, names: Sequence[str], rank: int, writer: str, after: int) -> Iterator[Chunk]:
        if not self._counts:
            return
        row = np.frombuffer(b"".join(self._row), "<u4") + np.repeat(np.array(self._firsts, np.int64), self._counts)
        step = np.frombuffer(b"".join(self._step), "<i8")
        time_ns = np.frombuffer(b"".join(self._time_ns), "<i8")
        fresh = slice(int(np.searchsorted(row, after)), None)
        for index, kept in zip(self._chosen, self._values, strict=True):
            value = np.frombuffer(b"".join(kept), "<f8")
            yield Chunk(Key(names[index], rank, writer), row, step, time_ns, value).take(fresh)


def _merge(chunks: Sequence[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    row, step, time_ns, value = (np.concatenate(column) for column in list(zip(*chunks, strict=True))[1:])
    merged = Chunk(chunks[0].key, row, step, time_ns, value)
    # The same name may be in several shapes, whose rows alternate.
    return merged.take(np.argsort(row, kind="stable"))


def columns(chunks: Iterable[Chunk]) -> Columns:
    """Chunks as one table, in their order."""
    kept = [chunk for chunk in chunks if len(chunk.row)]
    if not kept:
        return empty()
    names, writers = Table(), Table()
    sizes = [len(chunk.row) for chunk in kept]
    keys, row, step, time_ns, value = zip(*kept, strict=True)
    return Columns(
        name=np.repeat(names.translate(key.name for key in keys), sizes),
        rank=np.repeat(np.array([key.rank for key in keys], np.int32), sizes),
        writer=np.repeat(writers.translate(key.writer for key in keys), sizes),
        names=tuple(names.values),
        writers=tuple(writers.values),
        row=np.concatenate(row),
        step=np.concatenate(step),
        time_ns=np.concatenate(time_ns),
        value=np.concatenate(value),
    )
