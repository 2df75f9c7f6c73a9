"""The tracker's log: how a training process hands its numbers to the agent without ever waiting for it.

A writing process fills segments, files `<writer id>.<index>.log` with index 0, 1, 2, ..., each memory-mapped, so that
what was written survives the writer's death by any signal. A segment that is read to its end, acknowledged and not
needed for a checkpoint's cut is removed by the reader: a log does not grow for as long as the training runs. Every
segment can be read alone. Everything is little-endian and aligned to 8 bytes.

    header    96 bytes: magic "TYLOG\\0\\0\\2", writer id (16 bytes, a UUID), rank (i32), pid (u32), the process's
              start time (u64, clock ticks since boot), created_ns (i64), index (u64), number of the first row (u64),
              rows dropped so far (u64, changes), zeros
    record    size (u32, of the whole record, a multiple of 8, never 0), tag (u32: kind in the highest byte),
              payload, zeros or spaces, CRC-32 (u32) in the last 4 bytes
    the end   a size of 0; there is always one

    kind  low 24 bits of the tag   payload
    0     shape                    row: step (i64), time_ns (i64), then one f64 for each name of the shape
    1     shape                    JSON list of names: what rows of that shape in this segment consist of
    2     0                        progress: step (i64), total steps (i64, 0 when unknown), time_ns (i64)
    3     0                        facts: JSON object {"params" | "tags" | "note": value}

A segment is complete when the next one exists (its header being there). Rows are numbered 0, 1, 2, ... per writer; one
call of `log` is one row. Those numbers are the sequence numbers that the metrics service acknowledges and that a
checkpoint's cut names.

The size is stored last, with its record behind it, and the CRC covers the rest: a reader never takes a torn record for
a whole one; it stops before it and looks again later. A reader needs no lock and the writer never looks back.

Every CRC continues from the value `RESIDUE` instead of 0. A CRC-32 over data and its own CRC is that constant, whatever
the data, so that the CRC over any number of whole records, continued from `RESIDUE`, is `RESIDUE` again: one call
verifies thousands of them.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MAGIC = b"TYLOG\0\0\2"
SUFFIX = ".log"
HEADER = struct.Struct("<8s16siIQqQQQ24x")
DROPPED_AT = 64  # in the header
HEAD = struct.Struct("<II")
PROGRESS = struct.Struct("<qqq")
ROW, SHAPE, PROGRESS_MADE, FACTS = range(4)
KIND_SHIFT = 24
SHAPE_MASK = (1 << KIND_SHIFT) - 1
RESIDUE = 0x2144DF1C

FIRST_SIZE = 64 * 1024
LARGEST_SIZE = 4 * 1024 * 1024
MAX_RECORD = 1024 * 1024
_END = 8  # bytes of zeros behind the last record of a full segment


class TooLarge(Exception):
    """The record is larger than a record may be. Nothing was written."""


class SegmentFull(Exception):
    """The record goes into the next segment. Nothing was written."""


def segment_path(folder: Path, writer: str, index: int) -> Path:
    """Where a segment is kept.

    Args:
        writer: the writer's id in words, a UUID.
    """
    return folder / f"{writer}.{index:06d}{SUFFIX}"


class RowShape:
    """Names that are logged together.

    Attributes:
        pack: (size, number, step, time_ns, *values) -> the record of a row without its CRC.
        size: of such a record, with its CRC.
        number: of the shape within its segment.
    """

    __slots__ = ("number", "pack", "size")

    def __init__(self, number: int, names: int) -> None:
        self.number = number
        self.pack: Callable[..., bytes] = struct.Struct(f"<IIqq{names}d4x").pack
        self.size = HEAD.size + 16 + 8 * names + 8


def record(kind: int, payload: bytes = b"", *, shape: int = 0, filler: bytes = b"\0") -> bytes:
    """A record without its CRC.

    Raises:
        TooLarge: see there.
    """
    size = (HEAD.size + len(payload) + 4 + 7) & ~7
    if size > MAX_RECORD:
        raise TooLarge(f"a record of {len(payload):,} bytes; a little less than {MAX_RECORD:,} are allowed")
    return HEAD.pack(size, kind << KIND_SHIFT | shape) + payload.ljust(size - HEAD.size - 4, filler)


def json_record(kind: int, value: Sequence[str] | dict[str, Any], *, shape: int = 0) -> bytes:
    """A record of a JSON document, without its CRC. What JSON has no word for becomes its `str()`.

    Raises:
        TooLarge: see there.
    """
    return record(kind, json.dumps(value, default=str).encode(), shape=shape, filler=b" ")


class SegmentWriter:
    """Appends to one segment. Not for several threads at once; never shared with a forked child.

    An exception that a signal handler raises in the middle of a call leaves a segment that is whole.

    Attributes:
        index: of this segment.
        next_row: the number that the next row gets.
        shapes: what was declared in this segment.
        published: whether readers see it.
    """

    def __init__(
        self,
        path: Path,
        *,
        writer_id: bytes,
        rank: int,
        start_time: int,
        created_ns: int,
        index: int = 0,
        first_row: int = 0,
        room: int = 0,
    ) -> None:
        """
        Args:
            path: the file to create. One that is there already is what an exception left of another try.
            writer_id: 16 bytes, new for every incarnation of a writing process.
            start_time: of this process, in clock ticks since boot.
            room: bytes of records that have to fit at least.

        Raises:
            OSError: the file cannot be made; nothing is left of it.
        """
        self.index = index
        self.next_row = first_row
        self.shapes: dict[tuple[str, ...], RowShape] = {}
        self.published = False
        self._size = max(min(FIRST_SIZE << min(index, 16), LARGEST_SIZE), _page_up(HEADER.size + room + _END))
        self._map = _create(path, self._size)
        self._sizes = memoryview(self._map).cast("I")
        self._end = HEADER.size
        self._room = 0  # nothing is written into a segment that readers may not see yet
        header = HEADER.pack(MAGIC, writer_id, rank, os.getpid(), start_time, created_ns, index, first_row, 0)
        self._map[8 : HEADER.size] = header[8:]

    def publish(self) -> None:
        """From now on readers see this segment, and take the one before it for complete."""
        self._map[:8] = MAGIC
        self._room = self._size - _END
        self.published = True

    def append(self, record: bytes) -> None:
        """Adds one record, given without its CRC; it is there for readers when this returns.

        Raises:
            SegmentFull: see there.
        """
        start = self._end
        at = start >> 2
        if self._sizes[at]:
            return self._catch_up(record)
        stop = start + len(record) + 4
        if stop > self._room:
            raise SegmentFull
        crc = zlib.crc32(record, RESIDUE).to_bytes(4, "little")
        self._map[start + 4 : stop] = record[4:] + crc
        self._sizes[at] = stop - start
        self._end = stop
        if record[7] == ROW:
            self.next_row += 1

    def _catch_up(self, record: bytes) -> None:
        """An exception that a signal handler raised came between a record and the notice of it."""
        while size := self._sizes[self._end >> 2]:
            self.next_row += self._map[self._end + 7] == ROW
            self._end += size
        self.append(record)

    @property
    def room(self) -> int:
        """Bytes of records that still fit."""
        return self._room - self._end

    def count_dropped(self, rows: int) -> None:
        """Says how many rows were dropped so far, which needs no room."""
        self._map[DROPPED_AT : DROPPED_AT + 8] = rows.to_bytes(8, "little")

    def close(self) -> None:
        """Lets go of the file; its records stay."""
        self._sizes.release()
        self._map.close()


def _page_up(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _create(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        # Reserved, not only promised: writing to a mapped page the disk has no room for would kill the process.
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
