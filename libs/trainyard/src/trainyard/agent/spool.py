"""Numbered records that are not yet acknowledged, on disk: however long the yard is away, memory stays small.

Segments `lines-<first number>`; a record is its length (u32, little-endian) and its bytes. A segment goes when all of
it is acknowledged. Nothing is synced: this outlives the agent, and the machine's death takes the attempt with it
anyway.
"""

from __future__ import annotations

import errno
import os
import struct
from io import FileIO
from pathlib import Path

SEGMENT_BYTES = 1024 * 1024
_LENGTH = struct.Struct("<I")


class Spool:
    """Records 0, 1, 2, ...; read from any that is not forgotten."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._segments: list[int] = []  # first number of each, ascending
        self._file: FileIO | None = None
        self.next_seq = 0
        self._cursor = (0, 0, 0)  # number, segment, offset of where the last read stopped

    @classmethod
    def reopen(cls, folder: Path) -> Spool:
        """The spool another process left, to be read; a record it was still writing is not part of it."""
        spool = cls(folder)
        spool._segments = sorted(int(path.name.removeprefix("lines-")) for path in folder.glob("lines-*"))
        if spool._segments:
            spool.next_seq = spool._segments[-1] + _count(spool._path(spool._segments[-1]))
        return spool

    def append(self, records: list[bytes]) -> None:
        """Adds records, numbered from `next_seq`.

        Raises:
            OSError: the disk is full. Nothing is numbered then.
        """
        if not records:
            return
        file = self._writable()
        start = file.tell()
        data = b"".join(_LENGTH.pack(len(record)) + record for record in records)
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.seek(start)
            file.truncate()
            raise
        self.next_seq += len(records)

    def _writable(self) -> FileIO:
        if self._file is None or self._file.tell() >= self._segment_bytes:
            if self._file is not None:
                self._file.close()
            # Unbuffered: after a failed write nothing may be left to be written later.
            self._file = FileIO(self._path(self.next_seq), "wb")
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
                records.append(file.read(_LENGTH.unpack(head)[0]))
                size += len(records[-1])
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
                offset += _LENGTH.size + _LENGTH.unpack(file.read(_LENGTH.size))[0]
                file.seek(offset)
                at += 1
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


def _count(segment: Path) -> int:
    """How many whole records a segment holds."""
    data = segment.read_bytes()
    count = offset = 0
    while offset + _LENGTH.size <= len(data):
        offset += _LENGTH.size + _LENGTH.unpack_from(data, offset)[0]
        count += offset <= len(data)
    return count
