"""Reading column files: Parquet whose bytes are verified before pyarrow sees them.

Parquet's own checksums leave headers and footer out. The manifest has a checksum of every row group and of the footer;
a reader fetches a whole row group at a time, compares, and decodes it from memory.
"""

from __future__ import annotations

import bisect
import io
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from trainyard_protos.v1.common_pb2 import LogLine

from trainyard_metrics.domain.columns import Columns
from trainyard_metrics.domain.lines import Line, LineFilter, Step, matcher
from trainyard_metrics.storage.files import Damaged
from trainyard_metrics.storage.manifest import ColumnFile, RowGroup

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = b"PAR1"
_LINE_COLUMNS = ("time_ns", "writer", "seq", "node", "rank", "stream", "text")
_BATCH_LINES = 512


class Verified(io.RawIOBase):
    """A column file as far as it was fetched and found to be what was written.

    Attributes:
        footer: its end, which says what is where.
    """

    def __init__(self, path: Path, file: ColumnFile) -> None:
        self._path = path
        self._file = file
        self._stored = path.open("rb", buffering=0)
        self._offset = 0
        self._start, self._content = 0, b""
        try:
            if self._fetch(0, len(MAGIC)) != MAGIC:
                raise Damaged(path, 0, "this is not a Parquet file")
            self.footer = self._verified(file.footer, "its footer")
        except BaseException:
            self.close()
            raise

    def load(self, group: int) -> None:
        """Fetches a row group, in place of the one before.

        Raises:
            Damaged
        """
        part = self._file.groups[group]
        self._start, self._content = part.offset, self._verified(part, f"row group {group}")

    def unload(self) -> None:
        """Forgets the row group that was fetched."""
        self._start, self._content = 0, b""

    def _verified(self, part: RowGroup, what: str) -> bytes:
        content = self._fetch(part.offset, part.length)
        if len(content) != part.length or zlib.crc32(content) != part.crc:
            raise Damaged(self._path, part.offset, f"{what} does not match its checksum")
        return content

    def _fetch(self, offset: int, length: int) -> bytes:
        return os.pread(self._stored.fileno(), length, offset)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._offset = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._file.size}[whence]
        return self._offset

    def read(self, size: int = -1) -> bytes:
        start = self._offset - self._start
        if size < 0 or start < 0 or start + size > len(self._content):
            raise Damaged(self._path, self._offset, "its footer points beyond the row group that is read")
        self._offset += size
        return self._content[start : start + size]

    def close(self) -> None:
        self._stored.close()
        super().close()


class _Reader:
    """One column file, row group by row group."""

    def __init__(self, path: Path, file: ColumnFile) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._verified = Verified(path, file)
        strings = ["name", "writer"] if file.kind == "points" else ["writer", "stream"]
        try:
            metadata = pq.read_metadata(pa.BufferReader(self._verified.footer))
            self._parquet = pq.ParquetFile(self._verified, metadata=metadata, read_dictionary=strings)
        except Exception:
            self._verified.close()
            raise
        self._columns = {name: index for index, name in enumerate(self._parquet.schema_arrow.names)}
        self.groups = range(self._parquet.num_row_groups)

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._verified.close()

    def range(self, group: int, column: str) -> tuple[Any, Any]:
        """The smallest and the largest value of a column in a row group."""
        statistics = self._parquet.metadata.row_group(group).column(self._columns[column]).statistics
        return statistics.min, statistics.max

    def read(self, group: int) -> pa.Table:
        """A row group, verified.

        Raises:
            Damaged
        """
        self._verified.load(group)
        table = self._parquet.read_row_group(group, use_threads=False)
        self._verified.unload()
        return table


def read_points(
    path: Path,
    file: ColumnFile,
    names: Sequence[str] | None = None,
    ranks: frozenset[int] | None = None,
    after: Mapping[str, int] | None = None,
    groups: Sequence[int] | None = None,
) -> Iterator[Columns]:
    """Points of a file in its order, at most a row group at a time.

    Args:
        groups: of these row groups; None: of all.
        names: of these, sorted; None: of all.
        ranks: of these; None: of all.
        after: the first row wanted of each writer; 0 for those it lacks.

    Raises:
        Damaged
        FileNotFoundError: the run was removed meanwhile.
    """
    if after and all(last < after.get(writer, 0) for writer, (_, last) in file.writers.items()):
        return
    with _Reader(path, file) as reader:
        for group in reader.groups if groups is None else groups:
            if names is not None and not _any_within(names, *reader.range(group, "name")):
                continue
            found = _chosen(_points(reader.read(group)), names, ranks, after)
            if len(found):
                yield found


def _any_within(names: Sequence[str], lowest: str, highest: str) -> bool:
    first = bisect.bisect_left(names, lowest)
    return first < len(names) and names[first] <= highest


def _points(table: pa.Table) -> Columns:
    names, name = _dictionary(table, "name")
    writers, writer = _dictionary(table, "writer")
    arrays = {column: table.column(column).to_numpy() for column in ("rank", "row", "step", "time_ns", "value")}
    return Columns(names=names, writers=writers, name=name, writer=writer, **arrays)


def _dictionary(table: pa.Table, column: str) -> tuple[tuple[str, ...], Any]:
    array = table.column(column).combine_chunks()
    if hasattr(array, "chunks"):
        array = array.unify_dictionaries().chunk(0)
    return tuple(array.dictionary.to_pylist()), array.indices.to_numpy()


def _chosen(
    points: Columns, names: Sequence[str] | None, ranks: frozenset[int] | None, after: Mapping[str, int] | None
) -> Columns:
    kept = np.ones(len(points), np.bool_)
    if names is not None:
        wanted = set(names)
        kept &= np.array([name in wanted for name in points.names], np.bool_)[points.name]
    if ranks is not None:
        kept &= np.isin(points.rank, list(ranks))
    if after:
        kept &= points.row >= np.array([after.get(writer, 0) for writer in points.writers], np.int64)[points.writer]
    return points if kept.all() else points.take(kept)


def read_lines(
    path: Path,
    file: ColumnFile,
    wanted: LineFilter | None = None,
    *,
    backwards: bool = False,
    groups: Sequence[int] | None = None,
) -> Iterator[Step]:
    """Lines of a file by time, writer and number, the other way round when `backwards`; before those of a row group,
    their bound: files that follow each other in time are decoded one after the other.

    Args:
        wanted: None: all.
        groups: of these row groups; None: of all.

    Raises:
        Damaged
        FileNotFoundError: the run was removed meanwhile.
    """
    chosen = wanted or LineFilter()
    accepts = matcher(chosen)
    with _Reader(path, file) as reader:
        numbers = reader.groups if groups is None else groups
        for group in reversed(numbers) if backwards else numbers:
            first, last = reader.range(group, "time_ns")
            if last >= chosen.from_time_ns:
                yield (last + 1 if backwards else first, "", -1), None
                yield from _lines(reader.read(group), chosen, accepts, backwards)


def _lines(table: pa.Table, wanted: LineFilter, accepts: Callable[[LogLine], bool], backwards: bool) -> Iterator[Line]:
    import pyarrow.compute as pc

    # Columns are cheap to compare; only what is left becomes messages.
    kept = pc.greater_equal(table.column("time_ns"), wanted.from_time_ns)
    if wanted.ranks:
        kept = pc.and_(kept, pc.is_in(table.column("rank"), value_set=_ranks(wanted.ranks)))
    if wanted.search:
        kept = pc.and_(kept, pc.match_substring(table.column("text"), wanted.search))
    batches = table.filter(kept).to_batches(_BATCH_LINES)
    del table  # an iterator that is not read on keeps no more than it has to
    for batch in reversed(batches) if backwards else batches:
        columns = (batch.column(name).to_pylist() for name in _LINE_COLUMNS)
        lines = [
            ((time_ns, writer, seq), line)
            for time_ns, writer, seq, node, rank, stream, text in zip(*columns, strict=True)
            if accepts(line := LogLine(seq=seq, time_ns=time_ns, node=node, rank=rank, stream=stream, text=text))
        ]
        yield from reversed(lines) if backwards else lines


def _ranks(ranks: frozenset[int]) -> pa.Array:
    import pyarrow as pa

    return pa.array(sorted(ranks), pa.int32())
