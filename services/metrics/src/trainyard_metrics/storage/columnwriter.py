"""Writing column files. Only the compactor does, and repair: pyarrow costs memory.

Points are columns name, rank, writer, row, step, time_ns, value; lines are time_ns, writer, seq, node, rank, stream,
text. Both are plain Parquet, so that anything can read them.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainyard_metrics.domain.columns import Columns
from trainyard_metrics.domain.gathering import Chunk, columns
from trainyard_metrics.domain.lines import Line
from trainyard_metrics.storage.columnfiles import MAGIC
from trainyard_metrics.storage.manifest import ColumnFile, RowGroup

GROUP_POINTS = 65_536
GROUP_LINES = 16_384
GROUP_TEXT = 4 * 1024 * 1024

_STRINGS = pa.dictionary(pa.int32(), pa.string())
_POINTS = pa.schema(
    [
        pa.field("name", _STRINGS, nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("writer", _STRINGS, nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ]
)
_LINES = pa.schema(
    [
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("writer", _STRINGS, nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("node", pa.int32(), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("stream", _STRINGS, nullable=False),
        pa.field("text", pa.string(), nullable=False),
    ]
)
_DELTA = ("row", "step", "time_ns", "seq", "node")
_STATISTICS = ("name", "rank", "writer", "row", "step", "time_ns", "seq")
_DICTIONARIES = ("name", "rank", "writer", "stream")


class ColumnWriter:
    """Writes one file, which is durable when the context ends without an error.

    Attributes:
        written: the file, when the context has ended; None when nothing was written.
    """

    def __init__(self, path: Path, name: str, kind: str, first: int, last: int, level: int) -> None:
        self.written: ColumnFile | None = None
        self._path = path
        self._name = name
        self._schema = _POINTS if kind == "points" else _LINES
        self._rows = 0
        self._writers: dict[str, tuple[int, int]] = {}
        metadata = {
            "trainyard.format": "1",
            "trainyard.kind": kind,
            "trainyard.segments": f"{first}-{last}",
            "trainyard.level": str(level),
        }
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b")
        self._parquet = pq.ParquetWriter(
            self._file,
            self._schema.with_metadata(metadata),
            compression="zstd",
            compression_level=1,
            use_dictionary=[name for name in self._schema.names if name in _DICTIONARIES],
            column_encoding={name: "DELTA_BINARY_PACKED" for name in self._schema.names if name in _DELTA},
            write_statistics=[name for name in self._schema.names if name in _STATISTICS],
            write_page_checksum=True,
        )

    def __enter__(self) -> ColumnWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._parquet.close()
            if kind is None and self._rows:
                self._file.flush()
                os.fsync(self._file.fileno())
                self.written = replace(describe(self._path, self._writers), name=self._name)
        finally:
            self._file.close()
        if self.written is None:
            self._path.unlink()

    def write(self, group: Columns | list[Line]) -> None:
        """Adds a row group: points by key and row, or lines by theirs."""
        if len(group):
            self._write_points(group) if isinstance(group, Columns) else self._write_lines(group)

    def _write_points(self, points: Columns) -> None:
        for index, writer in enumerate(points.writers):
            rows = points.row[points.writer == index]
            self._note(writer, int(rows.min()), int(rows.max()))
        arrays = [
            _strings(points.name, points.names),
            pa.array(points.rank),
            _strings(points.writer, points.writers),
            *(pa.array(column) for column in (points.row, points.step, points.time_ns, points.value)),
        ]
        self._write(arrays, len(points))

    def _write_lines(self, lines: list[Line]) -> None:
        for (_, writer, seq), _ in lines:
            self._note(writer, seq, seq)
        arrays = [
            pa.array([line.time_ns for _, line in lines], pa.int64()),
            pa.array([writer for (_, writer, _), _ in lines], pa.string()).dictionary_encode(),
            pa.array([line.seq for _, line in lines], pa.int64()),
            pa.array([line.node for _, line in lines], pa.int32()),
            pa.array([line.rank for _, line in lines], pa.int32()),
            pa.array([line.stream for _, line in lines], pa.string()).dictionary_encode(),
            pa.array([line.text for _, line in lines], pa.string()),
        ]
        self._write(arrays, len(lines))

    def _write(self, arrays: list[pa.Array], rows: int) -> None:
        self._parquet.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=rows)
        self._rows += rows

    def _note(self, writer: str, first: int, last: int) -> None:
        before = self._writers.get(writer, (first, last))
        self._writers[writer] = (min(before[0], first), max(before[1], last))


def describe(path: Path, writers: dict[str, tuple[int, int]]) -> ColumnFile:
    """What the manifest says of a file.

    Raises:
        pyarrow.ArrowException: it is not a column file.
    """
    with path.open("rb") as file:
        metadata = pq.read_metadata(file)
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        ends = [len(MAGIC), *(_begin(group) + _length(group) for group in groups)]
        if any(_begin(group) != end for group, end in zip(groups, ends, strict=False)):
            raise ValueError(f"{path}: row groups do not follow each other")
        facts = metadata.metadata
        first, last = map(int, facts[b"trainyard.segments"].split(b"-"))
        size = os.fstat(file.fileno()).st_size
        return ColumnFile(
            name=path.name,
            kind=facts[b"trainyard.kind"].decode(),
            first=first,
            last=last,
            level=int(facts[b"trainyard.level"]),
            size=size,
            groups=tuple(
                _part(file.fileno(), start, end, group.num_rows)
                for (start, end), group in zip(pairwise(ends), groups, strict=True)
            ),
            footer=_part(file.fileno(), ends[-1], size, 0),
            writers=writers,
        )


def _part(descriptor: int, start: int, end: int, rows: int) -> RowGroup:
    return RowGroup(start, end - start, zlib.crc32(os.pread(descriptor, end - start, start)), rows)


def writers_of(path: Path) -> dict[str, tuple[int, int]]:
    """The first and last record number of each writer in a column file."""
    number = "row" if "row" in pq.read_schema(path).names else "seq"
    found = pq.read_table(path, columns=["writer", number]).group_by("writer").aggregate([(number, "min_max")])
    return {
        row["writer"]: (row[f"{number}_min_max"]["min"], row[f"{number}_min_max"]["max"]) for row in found.to_pylist()
    }


def _strings(indexes: Any, values: tuple[str, ...]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(indexes, pa.int32()), pa.array(values, pa.string()))


def _begin(group: Any) -> int:
    return min(_offset(group.column(index)) for index in range(group.num_columns))


def _offset(column: Any) -> int:
    if column.has_dictionary_page:
        return min(int(column.dictionary_page_offset), int(column.data_page_offset))
    return int(column.data_page_offset)


def _length(group: Any) -> int:
    return sum(int(group.column(index).total_compressed_size) for index in range(group.num_columns))


def groups_of_points(chunks: Iterable[Chunk]) -> Iterator[Columns]:
    """Chunks in row groups of the same size; the last one may be smaller."""
    waiting: list[Chunk] = []
    size = 0
    for chunk in chunks:
        rest = chunk
        while size + len(rest.row) >= GROUP_POINTS:
            room = GROUP_POINTS - size
            yield columns([*waiting, rest.take(slice(room))])
            rest, waiting, size = rest.take(slice(room, None)), [], 0
        waiting.append(rest)
        size += len(rest.row)
    yield columns(waiting)


def groups_of_lines(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Lines in row groups that are bounded in number and in size."""
    waiting: list[Line] = []
    size = 0
    for line in lines:
        waiting.append(line)
        size += len(line[1].text)
        if len(waiting) == GROUP_LINES or size >= GROUP_TEXT:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting
