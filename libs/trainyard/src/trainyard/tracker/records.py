"""The tracker's log: how a training process hands its numbers to the agent without ever waiting for it.

One file per writing process, memory-mapped by its writer, so that what was written survives the writer's death by any
signal. Everything is little-endian.

    header    64 bytes: magic "TYLOG\\0\\0\\1", writer id (16 bytes, a UUID), rank (i32), pid (u32),
              created_ns (i64), zeros
    record    length of the payload (u32, never 0), CRC-32 of kind and payload (u32), kind (u8), payload,
              zeros up to a multiple of 8
    the end   a length of 0: files grow by zeros

The length is stored last, with its record behind it, and the CRC covers the rest: a reader never takes a torn record
for a whole one; it stops before it and looks again later. A reader needs no lock and the writer never looks back.

    kind  payload
    1     shape: JSON list of names; shapes are numbered 0, 1, 2, ... in the order they appear
    2     points: shape (u32), step (i64), time_ns (i64), then one f64 for each name of the shape
    3     progress: step (i64), total steps (i64, 0 when unknown), time_ns (i64)
    4     facts: JSON object {"params" | "tags" | "note": value}
    5     the end: the writer said that it is done

Points are numbered 0, 1, 2, ... per writer, name by name within a record. Those numbers are the sequence numbers that
the metrics service acknowledges.
"""

from __future__ import annotations

import copy
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"TYLOG\0\0\1"
SUFFIX = ".log"
HEADER = struct.Struct("<8s16siIq24x")
FRAME = struct.Struct("<IIB")
POINTS = struct.Struct("<Iqq")
PROGRESS = struct.Struct("<qqq")
SHAPE_KIND, POINTS_KIND, PROGRESS_KIND, FACTS_KIND, END_KIND = 1, 2, 3, 4, 5

FIRST_SIZE = 64 * 1024
LARGEST_STEP_OF_GROWTH = 4 * 1024 * 1024
MAX_PAYLOAD = 1024 * 1024


class LogFull(Exception):
    """The record is larger than a record may be, or the disk is full. Nothing was written."""


class LogWriter:
    """Appends to one log file. Not for several threads at once; never shared with a forked child."""

    def __init__(self, path: Path, writer_id: bytes, rank: int, created_ns: int) -> None:
        """
        Args:
            path: the file to create; it must not exist.
            writer_id: 16 bytes, new for every incarnation of a writing process.

        Raises:
            OSError: the file cannot be made.
        """
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Reserved, not only promised: writing to a mapped page the disk has no room for would kill the process.
            os.posix_fallocate(self._fd, 0, FIRST_SIZE)
            self._map = mmap.mmap(self._fd, FIRST_SIZE)
        except OSError:
            os.close(self._fd)
            raise
        self._size = FIRST_SIZE
        self._end = HEADER.size
        # The magic goes last: a file without it is not yet a log.
        self._map[8 : HEADER.size] = HEADER.pack(MAGIC, writer_id, rank, os.getpid(), created_ns)[8:]
        self._map[:8] = MAGIC

    def append(self, kind: int, payload: bytes) -> None:
        """Adds one record; it is there for readers when this returns.

        Raises:
            LogFull: see there.
        """
        start = self._end
        stop = start + FRAME.size + len(payload)
        following = (stop + 7) & ~7
        if following > self._size:
            self._grow(len(payload), following)
        body = bytes((kind,)) + payload
        self._map[start + 4 : stop] = zlib.crc32(body).to_bytes(4, "little") + body
        self._map[start : start + 4] = (len(payload) or _EMPTY).to_bytes(4, "little")
        self._end = following

    def _grow(self, payload: int, needed: int) -> None:
        if payload > MAX_PAYLOAD:
            raise LogFull(f"a record of {payload:,} bytes; at most {MAX_PAYLOAD:,} are allowed")
        size = self._size
        while size < needed:
            size += min(size, LARGEST_STEP_OF_GROWTH)
        try:
            os.posix_fallocate(self._fd, self._size, size - self._size)
            self._map.resize(size)
        except OSError as error:
            raise LogFull(f"{self.path} cannot grow to {size:,} bytes: {error.strerror}") from error
        self._size = size

    def close(self) -> None:
        """Lets go of the file; its records stay."""
        self._map.close()
        os.close(self._fd)


_EMPTY = 0xFFFF_FFFF  # stands for a payload of no bytes, because a length of 0 is the end of the log


@dataclass(frozen=True, slots=True)
class Points:
    """Values that were logged together, numbered from `first_seq` in the order of `names`."""

    first_seq: int
    names: tuple[str, ...]
    step: int
    time_ns: int
    values: tuple[float, ...]

    @property
    def next_seq(self) -> int:
        return self.first_seq + len(self.names)


@dataclass(frozen=True, slots=True)
class ProgressMade:
    step: int
    total: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class Facts:
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    pass


Record = Points | ProgressMade | Facts | End


class LogReader:
    """Reads one log from its start, as far as it is whole, and again when there is more."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file has no header (yet).
        """
        self.path = path
        with path.open("rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise ValueError(f"{path} is not a tracker log, or not yet one")
        _, writer_id, self.rank, self.pid, self.created_ns = HEADER.unpack(header)
        self.writer_id: bytes = writer_id
        self._offset = HEADER.size
        self._next_seq = 0
        self._shapes: tuple[tuple[str, ...], ...] = ()

    @property
    def next_seq(self) -> int:
        """The number that the next point gets."""
        return self._next_seq

    @property
    def offset(self) -> int:
        """Where the next record begins in the file."""
        return self._offset

    def fork(self) -> LogReader:
        """Another reader that goes on from here."""
        return copy.copy(self)

    def read(self, limit_bytes: int = 1024 * 1024) -> Iterator[Record]:
        """Records that are whole and not yet read, from about `limit_bytes` of the file at most."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._offset)
            block = file.read(FRAME.size)
            if len(block) < FRAME.size or FRAME.unpack(block)[0] == 0:
                return  # nothing new, which is the most frequent answer
            # A record larger than the limit still has to fit.
            block += file.read(max(limit_bytes, _padded(FRAME.unpack(block)[0])))
        position = 0
        while position < max(limit_bytes, 1) and (found := _frame(block, position)):
            kind, payload, following = found
            record = self._record(kind, payload)
            position += following
            self._offset += following
            if record is not None:
                yield record

    def _record(self, kind: int, payload: bytes) -> Record | None:
        if kind == POINTS_KIND:
            shape, step, time_ns = POINTS.unpack_from(payload)
            names = self._shapes[shape]
            values = struct.unpack_from(f"<{len(names)}d", payload, POINTS.size)
            points = Points(self._next_seq, names, step, time_ns, values)
            self._next_seq = points.next_seq
            return points
        if kind == SHAPE_KIND:
            self._shapes += (tuple(json.loads(payload)),)
        elif kind == PROGRESS_KIND:
            return ProgressMade(*PROGRESS.unpack(payload))
        elif kind == FACTS_KIND:
            return Facts(json.loads(payload))
        elif kind == END_KIND:
            return End()
        return None  # a shape, or a kind that a newer writer knows


def _padded(length: int) -> int:
    """What a record takes on file, its payload of `length` bytes."""
    return (FRAME.size + (0 if length == _EMPTY else min(length, MAX_PAYLOAD)) + 7) & ~7


def _frame(block: bytes, position: int) -> tuple[int, bytes, int] | None:
    """Kind, payload and length on file of the record at `position`; None when there is no whole one."""
    if position + FRAME.size > len(block):
        return None
    length, crc, kind = FRAME.unpack_from(block, position)
    if length == 0:
        return None
    size = 0 if length == _EMPTY else length
    start = position + FRAME.size
    body = block[start - 1 : start + size]
    if len(body) != size + 1 or zlib.crc32(body) != crc:
        return None
    return kind, body[1:], _padded(length)
