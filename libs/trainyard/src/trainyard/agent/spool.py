"""Numbered records that are not yet acknowledged, on disk: however long the yard is away, memory stays small.

Segments `lines-<first number>` of entries: a length (u32, little-endian) and so many bytes. An entry is a record or,
with the highest bit of its length set, a mark. A mark ends every batch, and says how far into its source (i32) the
batch came; what stands behind the last mark was being written when the writer died, and does not count. A segment
begins with the newest mark of every source, and goes when all of it is acknowledged. Nothing is synced: this outlives
the agent, and the machine's death takes the attempt with it anyway.
"""

from __future__ import annotations

import errno
import os
import struct
from io import FileIO
from pathlib import Path

SEGMENT_BYTES = 1024 * 1024
_LENGTH = struct.Struct("<I")
_SOURCE = struct.Struct("<i")
_IS_MARK = 1 << 31


class Spool:
    """Records 0, 1, 2, ...; read from any that is not forgotten.

    Attributes:
        next_seq: number of the next record.
        marks: by source, what was said with its newest batch; never ahead of the records, and never behind.
    """

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._segments: list[int] = []  # first number of each, ascending
        self._file: FileIO | None = None
        self.next_seq = 0
        self.marks: dict[int, bytes] = {}
        self._cursor = (0, 0, 0)  # number, segment, offset of where the last read stopped

    @classmethod
    def reopen(cls, folder: Path) -> Spool:
        """The spool that a dead process left, to go on with; a batch it was still writing is not part of it."""
        spool = cls(folder)
        spool._segments = sorted(int(path.name.removeprefix("lines-")) for path in folder.glob("lines-*"))
        for first in spool._segments[-2:]:  # the last may have been begun by the batch that is not part of it
            count, end, marks = _scan(spool._path(first).read_bytes())
            os.truncate(spool._path(first), end)
            spool.next_seq = first + count
            spool.marks |= marks
        if spool._segments and spool.next_seq == spool._segments[-1]:
            spool._path(spool._segments.pop()).unlink()
        return spool

    def append(self, records: list[bytes], source: int | None = None, place: bytes = b"") -> None:
        """Adds a batch of records, numbered from `next_seq`; all of it is there afterwards, or nothing.

        Args:
            source: where they come from, if anybody will have to go on there,
            place: and how far they go in it.

        Raises:
            OSError: the disk is full. Nothing is numbered then.
        """
        if not records:
            return
        file = self._writable()
        start = file.tell()
        marks = self.marks if source is None else {**self.marks, source: place}
        opening = [] if start else [_mark(*each) for each in self.marks.items()]
        closing = _mark() if source is None else _mark(source, place)
        data = b"".join([*opening, *(_LENGTH.pack(len(record)) + record for record in records), closing])
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.seek(start)
            file.truncate()
            raise
        self.next_seq += len(records)
        self.marks = marks

    def _writable(self) -> FileIO:
        if self._file is None or self._file.tell() >= self._segment_bytes:
            # Unbuffered: after a failed write nothing may be left to be written later. The segment before stays in use
            # until there is another: when this one cannot be opened, the next batch tries again.
            file = FileIO(self._path(self.next_seq), "wb")
            self.close()
            self._file = file
            self._segments.append(self.next_seq)
        return self._file

    def read(self, seq: int, limit: int, limit_bytes: int) -> list[bytes]:
        """Records from number `seq` on, at most `limit` of them and about `limit_bytes`."""
        records: list[bytes] = []
        size = 0
        while seq < self.next_seq and len(records) < limit and size < limit_bytes:
            segment, offset = self._locate(seq)
            wanted = min(limit - len(records), self.next_seq - seq)
            found = self._read_segment(segment, offset, wanted, limit_bytes - size)
            if not found:
                break
            records += found
            size += sum(map(len, found))
            seq += len(found)
        return records

    def _read_segment(self, segment: int, offset: int, limit: int, limit_bytes: int) -> list[bytes]:
        records: list[bytes] = []
        size = 0
        number = self._cursor[0]
        with self._path(segment).open("rb") as file:
            file.seek(offset)
            while len(records) < limit and size < limit_bytes and (head := file.read(_LENGTH.size)):
                length, is_mark = _decode(head)
                body = file.read(length)
                if not is_mark:
                    records.append(body)
                    size += length
            self._cursor = (number + len(records), segment, file.tell())
        return records

    def _locate(self, seq: int) -> tuple[int, int]:
        """Segment and offset of a record; leaves the cursor there."""
        segment = max(first for first in self._segments if first <= seq)
        at, where, offset = self._cursor
        if where != segment or at > seq:
            at, offset = segment, 0
        with self._path(segment).open("rb") as file:
            file.seek(offset)
            while at < seq:
                length, is_mark = _decode(file.read(_LENGTH.size))
                offset += _LENGTH.size + length
                file.seek(offset)
                at += not is_mark
        self._cursor = (seq, segment, offset)
        return segment, offset

    def forget(self, below: int) -> None:
        """Everything below this number is acknowledged."""
        while len(self._segments) > 1 and self._segments[1] <= below:
            self._path(self._segments.pop(0)).unlink()

    def close(self) -> None:
        """Lets go of the files; when everything is acknowledged, the caller may remove them."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _path(self, first: int) -> Path:
        return self._folder / f"lines-{first:012d}"


def _mark(source: int | None = None, place: bytes = b"") -> bytes:
    body = b"" if source is None else _SOURCE.pack(source) + place
    return _LENGTH.pack(len(body) | _IS_MARK) + body


def _decode(head: bytes) -> tuple[int, bool]:
    """Length of an entry, and whether it is a mark."""
    (length,) = _LENGTH.unpack(head)
    return length & ~_IS_MARK, bool(length & _IS_MARK)


def _scan(segment: bytes) -> tuple[int, int, dict[int, bytes]]:
    """Of the batches that a segment holds whole: how many records, where they end, their marks."""
    marks: dict[int, bytes] = {}
    counted = count = offset = end = 0
    while offset + _LENGTH.size <= len(segment):
        length, is_mark = _decode(segment[offset : offset + _LENGTH.size])
        body = segment[offset + _LENGTH.size : offset + _LENGTH.size + length]
        offset += _LENGTH.size + length
        if offset > len(segment):
            break
        counted += not is_mark
        if is_mark:
            count, end = counted, offset
        if is_mark and body:
            marks[_SOURCE.unpack_from(body)[0]] = body[_SOURCE.size :]
    return count, end, marks
