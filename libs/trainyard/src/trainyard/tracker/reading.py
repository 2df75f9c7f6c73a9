"""Reading a tracker's log: in stretches of thousands of records, with no work per value.

A stretch is cut into groups, one for each shape. The records of a group, laid end to end, are a matrix of 8-byte words;
its columns are slices with a stride.
"""

from __future__ import annotations

import copy
import json
import os
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from trainyard.tracker.records import (
    FACTS,
    HEAD,
    HEADER,
    KIND_SHIFT,
    MAGIC,
    MAX_RECORD,
    PROGRESS,
    PROGRESS_MADE,
    RESIDUE,
    SHAPE,
    SHAPE_MASK,
    segment_path,
)

STRETCH_BYTES = 256 * 1024
_PEEK_BYTES = 8 * 1024
_STEP, _TIME, _VALUES = 1, 2, 3  # columns of a row's record
_SIZE_MASK = 0xFFFF_FFFF
_KIND_AT = 32 + KIND_SHIFT  # in a record's first word
_FIRST_OTHER = 1 << _KIND_AT  # below are first words of rows


@dataclass(frozen=True, slots=True)
class Header:
    """What the first bytes of a segment say."""

    writer_id: bytes
    rank: int
    pid: int
    start_time: int
    created_ns: int
    index: int
    first_row: int
    dropped: int


def read_header(path: Path) -> Header:
    """
    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no header (yet).
    """
    with path.open("rb", buffering=0) as file:
        content = file.read(HEADER.size)
    if len(content) < HEADER.size or not content.startswith(MAGIC):
        raise ValueError(f"{path} is not a tracker log, or not yet one")
    return Header(*HEADER.unpack(content)[1:])


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one shape within a stretch.

    Attributes:
        names: of the values in a row.
        numbers: of the rows, counted from the first row of the stretch; ascending.
        words: the records laid end to end, format "Q".
    """

    names: tuple[str, ...]
    numbers: range | list[int]
    words: memoryview

    @property
    def _stride(self) -> int:
        return len(self.words) // len(self.numbers)

    def column(self, index: int) -> bytes:
        """The values of the name with that index, little-endian f64."""
        return self.words[_VALUES + index :: self._stride].tobytes()

    def steps(self) -> bytes:
        """Little-endian i64."""
        return self.words[_STEP :: self._stride].tobytes()

    def times_ns(self) -> bytes:
        """Little-endian i64."""
        return self.words[_TIME :: self._stride].tobytes()

    def row(self, index: int) -> tuple[int, int, tuple[float, ...]]:
        """Step, time and values of the row at that place in the group; -1 is the last."""
        begin = index % len(self.numbers) * self._stride
        record = self.words[begin : begin + self._stride].tobytes()
        step, time_ns, *values = struct.unpack_from(f"<qq{len(self.names)}d", record, HEAD.size)
        return step, time_ns, tuple(values)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a script said about how far it is."""

    step: int
    total: int
    time_ns: int


@dataclass(slots=True)
class Stretch:
    """Whole records that follow one another in a segment.

    Attributes:
        first_row: number of the first row.
        count: of rows.
        groups: the rows, by shape; a shape whose newest row is newer stands behind the others.
        progress: what the script said, in order.
        facts: params, tags and notes, in order.
    """

    first_row: int
    count: int = 0
    groups: list[Group] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)


class LogReader:
    """Reads the segments of one writer in order, as far as they are whole, and again when there is more.

    Attributes:
        writer: the writer's id in words.
        index: of the segment that is read.
        next_row: the number that the next row read gets.
    """

    def __init__(self, folder: Path, writer: str, index: int = 0) -> None:
        """
        Args:
            index: of the segment to begin with.

        Raises:
            FileNotFoundError: there is no such segment.
            ValueError: it has no header (yet).
        """
        self.writer = writer
        self._folder = folder
        self._enter(index)

    def _enter(self, index: int) -> None:
        self.header = read_header(segment_path(self._folder, self.writer, index))
        self.index = index
        self.next_row = self.header.first_row
        self._offset = HEADER.size
        self._shapes: dict[int, tuple[str, ...]] = {}

    @property
    def path(self) -> Path:
        """Of the segment that is read."""
        return segment_path(self._folder, self.writer, self.index)

    def fork(self) -> LogReader:
        """Another reader that goes on from here."""
        return copy.copy(self)

    def dropped(self) -> int:
        """Rows that the writer had no room for, so far."""
        return read_header(self.path).dropped

    def read(self, limit_bytes: int = STRETCH_BYTES, max_rows: int | None = None) -> Stretch | None:
        """The next records; None when there are none yet. Never goes from one segment into the next in one stretch.

        Args:
            limit_bytes: of the file to read, about.
            max_rows: to stop behind; 0 gives None.

        Raises:
            FileNotFoundError: the segment is gone.
        """
        if max_rows == 0:
            return None
        stretch = self._read(limit_bytes, max_rows)
        if stretch is None and self._is_complete():
            # What came last into this segment may have come after it was read, but before the next one existed.
            stretch = self._read(limit_bytes, max_rows)
            if stretch is None:
                self._enter(self.index + 1)
                return self.read(limit_bytes, max_rows)
        return stretch

    def leave(self, index: int) -> None:
        """The segment of that index is about to be removed: goes on behind it, if this reader is not there already."""
        if self.index <= index:
            self._enter(index + 1)

    def skip_to(self, row: int) -> None:
        """Goes on until `row` is the next; stops earlier where the log ends."""
        while self.next_row < row and self.read(max_rows=row - self.next_row) is not None:
            pass

    def _is_complete(self) -> bool:
        try:
            following = read_header(segment_path(self._folder, self.writer, self.index + 1))
        except (FileNotFoundError, ValueError):
            return False
        # Rows in between would be missing, were a record damaged: the log ends there.
        return following.first_row == self.next_row

    def _load(self, limit_bytes: int) -> bytes:
        """Bytes from the present place on, in full words; b"" when no record begins there."""
        with self.path.open("rb", buffering=0) as file:
            block = os.pread(file.fileno(), min(limit_bytes, _PEEK_BYTES), self._offset)
            size = int.from_bytes(block[:4], "little")
            if size == 0:
                return b""  # nothing new, which is the most frequent answer
            if size > len(block) or block[-8:] != bytes(8):
                # A record larger than the limit still has to fit.
                block = os.pread(file.fileno(), max(limit_bytes, min(size, MAX_RECORD)), self._offset)
        return block[: len(block) & ~7]

    def _read(self, limit_bytes: int, max_rows: int | None) -> Stretch | None:
        data = self._load(limit_bytes)
        if not data:
            return None
        words = memoryview(data).cast("Q")
        places, stop = _walk(words, max_rows)
        if zlib.crc32(data[:stop], RESIDUE) != RESIDUE:
            places, stop = _walk(words[: _first_torn(data) >> 3], max_rows)
        if not stop:
            return None
        stretch = self._sort(data, words, places)
        self._offset += stop
        self.next_row += stretch.count
        return stretch

    def _sort(self, data: bytes, words: memoryview, places: dict[int, list[int]]) -> Stretch:
        rows = {head: at for head, at in places.items() if not head >> _KIND_AT}
        stretch = Stretch(self.next_row, sum(map(len, rows.values())))
        for number, payload in _payloads(data, places, SHAPE):
            self._shapes = {**self._shapes, number: tuple(json.loads(payload))}  # forks keep theirs
        for head, numbers in _numbered(rows):
            stretch.groups.append(Group(self._shapes[head >> 32], numbers, _matrix(data, words, rows[head])))
        for _, payload in _payloads(data, places, PROGRESS_MADE):
            stretch.progress.append(Progress(*PROGRESS.unpack_from(payload)))
        stretch.facts = [json.loads(payload) for _, payload in _payloads(data, places, FACTS)]
        return stretch


def _walk(words: memoryview, max_rows: int | None) -> tuple[dict[int, list[int]], int]:
    """Where records begin, by their first word, in words; and how many bytes they take together.

    This is the only work per record.
    """
    places: defaultdict[int, list[int]] = defaultdict(list)
    left = len(words) if max_rows is None else max_rows
    at, end = 0, len(words)
    while at < end:
        head = words[at]
        following = at + ((head & _SIZE_MASK) >> 3)
        if following == at or following > end:
            break
        if head < _FIRST_OTHER:
            if not left:
                break
            left -= 1
        places[head].append(at)
        at = following
    return places, at * 8


def _first_torn(data: bytes) -> int:
    """Where the first record begins that does not match its CRC."""
    at = 0
    while size := int.from_bytes(data[at : at + 4], "little"):
        if at + size > len(data) or zlib.crc32(data[at : at + size], RESIDUE) != RESIDUE:
            break
        at += size
    return at


def _payloads(data: bytes, places: dict[int, list[int]], kind: int) -> Iterator[tuple[int, bytes]]:
    """Shape number and payload, with what fills it up, of the records of one kind, in order."""
    found = sorted((at, head) for head, begins in places.items() if head >> _KIND_AT == kind for at in begins)
    for at, head in found:
        begin = at * 8
        yield head >> 32 & SHAPE_MASK, data[begin + HEAD.size : begin + (head & _SIZE_MASK) - 4]


def _numbered(rows: dict[int, list[int]]) -> list[tuple[int, range | list[int]]]:
    """First word and row numbers of each shape, counted from the stretch's first row; the newest shape last."""
    if len(rows) == 1:
        return [(head, range(len(places))) for head, places in rows.items()]
    number_at = {at: number for number, at in enumerate(sorted(chain(*rows.values())))}
    newest_last = sorted(rows.items(), key=lambda item: item[1][-1])
    return [(head, [number_at[at] for at in places]) for head, places in newest_last]


def _matrix(data: bytes, words: memoryview, places: list[int]) -> memoryview:
    """The records at these places, end to end."""
    stride = (words[places[0]] & _SIZE_MASK) >> 3
    if places[-1] - places[0] == (len(places) - 1) * stride:
        return words[places[0] : places[-1] + stride]
    size = stride * 8
    return memoryview(b"".join([data[at * 8 : at * 8 + size] for at in places])).cast("Q")
