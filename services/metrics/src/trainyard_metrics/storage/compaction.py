"""Making column files of journal segments, and larger column files of smaller ones.

Everything is verified as it is read. Outputs get temporary names: the server alone makes them count.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from trainyard_protos.v1.metrics_pb2 import AppendRequest

from trainyard_metrics.domain import batches
from trainyard_metrics.domain.columns import Columns
from trainyard_metrics.domain.gathering import Chunk, Gatherer, Key
from trainyard_metrics.domain.lines import Line, in_order, order
from trainyard_metrics.storage.columnfiles import read_lines, read_points
from trainyard_metrics.storage.columnwriter import ColumnWriter, groups_of_lines, groups_of_points
from trainyard_metrics.storage.files import columns_name, segment_name
from trainyard_metrics.storage.frames import frames
from trainyard_metrics.storage.made import Made
from trainyard_metrics.storage.manifest import ColumnFile


def compact(folder: Path, number: int) -> Made:
    """Column files of one segment: one of points, one of lines, as far as it has any.

    Raises:
        Damaged: the segment is not what was written.
        OSError
    """
    made, gatherer, lines = Made(), Gatherer(), list[Line]()
    for _, requests in frames(folder / segment_name(number)):
        for request in requests:
            _note(made, request)
            gatherer.add(request)
            lines += ((order(request.writer_id, line), line) for line in request.lines.lines)
    lines.sort(key=lambda line: line[0])
    chunks = gatherer.chunks()
    made.names = sorted({chunk.key.name for chunk in chunks})
    _store(folder, made, "points", (number, number, 0), groups_of_points(chunks))
    _store(folder, made, "lines", (number, number, 0), groups_of_lines(lines))
    return made


def _note(made: Made, request: AppendRequest) -> None:
    made.positions[request.writer_id] = request.first_seq + batches.count(request)
    if request.HasField("lines"):
        made.line_times[request.writer_id] = request.lines.lines[-1].time_ns


def merge(folder: Path, files: Sequence[ColumnFile]) -> Made:
    """One file of several of the same kind, which follow each other.

    Raises:
        Damaged: one of them is not what was written.
        OSError
    """
    made = Made()
    kind, levels = files[0].kind, [file.level for file in files]
    identity = (files[0].first, files[-1].last, 1 + max(levels))
    if kind == "points":
        sources = [_numbered(index, folder, file) for index, file in enumerate(files)]
        merged = heapq.merge(*sources, key=lambda found: (found[1].key, found[0]))
        _store(folder, made, kind, identity, groups_of_points(chunk for _, chunk in merged))
    else:
        lines = in_order(read_lines(folder / file.name, file) for file in files)
        _store(folder, made, kind, identity, groups_of_lines(lines))
    return made


def _numbered(index: int, folder: Path, file: ColumnFile) -> Iterator[tuple[int, Chunk]]:
    # Of a key that is in several files, the older file has the lower rows.
    for group in read_points(folder / file.name, file):
        for chunk in split(group):
            yield index, chunk


def split(points: Columns) -> Iterator[Chunk]:
    """Points that are ordered by key, as chunks."""
    changed = np.diff(points.name) | np.diff(points.rank) | np.diff(points.writer)
    edges = [0, *(np.flatnonzero(changed) + 1).tolist(), len(points)]
    for start, end in itertools.pairwise(edges):
        part = slice(start, end)
        key = Key(points.names[points.name[start]], int(points.rank[start]), points.writers[points.writer[start]])
        yield Chunk(key, points.row[part], points.step[part], points.time_ns[part], points.value[part])


def _store(
    folder: Path,
    made: Made,
    kind: str,
    identity: tuple[int, int, int],
    groups: Iterator[Columns] | Iterator[list[Line]],
) -> None:
    first, last, level = identity
    name = columns_name(kind, first, last)
    with ColumnWriter(folder / (name + made.suffix), name, kind, first, last, level) as writer:
        for group in groups:
            writer.write(group)
    if writer.written is not None:
        made.files.append(writer.written)
