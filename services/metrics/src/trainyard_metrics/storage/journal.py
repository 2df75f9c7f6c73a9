"""Append-only files of frames: what was acknowledged stays, what a crash tore is cut off, what is damaged is found.

    file   := "TYRECS2\\n" frame*
    frame  := length:u32 crc(payload):u32 crc(length, crc):u32 payload      (little endian, CRC-32 as in zlib)
    payload:= (length:u32 AppendRequest)*

A frame is what was written with one fsync. A crash can tear the last frame alone, because the next is written only
after the fsync. A last frame that is short, or has zeros where its end or a page never reached the disk, was torn and
never acknowledged; one that is bad in any other way, or anywhere else, is damage.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from servicekit.disk import sync_folder
from trainyard_protos.v1.metrics_pb2 import AppendRequest

from trainyard_metrics.storage.files import Damaged, write_all

MAGIC = b"TYRECS2\n"
_HEADER = struct.Struct("<III")
_CHECKED = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_SEARCHED = 1024 * 1024
_PAGE = 4096


class Journal:
    """The file that grows. Not for several threads at once.

    Attributes:
        size: bytes that are durable.
        torn: bytes cut off when the file was opened; a copy lies beside the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.torn = 0
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def recover(self) -> Iterator[tuple[int, list[AppendRequest]]]:
        """Reads the file from the start: (offset, requests) of every frame. To be exhausted before anything else.

        Raises:
            Damaged: a frame that was once acknowledged is damaged.
        """
        end = os.fstat(self._descriptor).st_size
        if os.pread(self._descriptor, len(MAGIC), 0) != MAGIC:
            self._begin(end)
            return
        self.size = len(MAGIC)
        while self.size < end:
            payload = self._recover_frame(end)
            if payload is None:
                self._cut(end)
                return
            offset = self.size
            self.size += _HEADER.size + len(payload)
            yield offset, unpack(payload)

    def append(self, requests: Sequence[AppendRequest]) -> int:
        """Writes one frame, durably; returns its offset. After an error nothing of it is there.

        Raises:
            OSError: the disk is full, or failed.
        """
        frame = make_frame(requests)
        offset = self.size
        try:
            write_all(self._descriptor, frame, offset)
            os.fdatasync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, offset)
            raise
        self.size += len(frame)
        return offset

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def _begin(self, end: int) -> None:
        # The header is written with the first frame's fsync: a short or empty file was never acknowledged.
        if end > len(MAGIC):
            raise Damaged(self.path, 0, "this is not a file of records")
        write_all(self._descriptor, MAGIC, 0)
        os.fsync(self._descriptor)
        for folder in (self.path.parent, self.path.parent.parent):
            sync_folder(folder)
        self.size = len(MAGIC)

    def _recover_frame(self, end: int) -> bytes | None:
        try:
            return read_frame(self._descriptor, self.path, self.size)
        except Damaged:
            if self._torn_at(self.size, end):
                return None
            raise

    def _torn_at(self, offset: int, end: int) -> bool:
        header = os.pread(self._descriptor, _HEADER.size, offset)
        if len(header) < _HEADER.size:
            return True
        length, _, check = _HEADER.unpack(header)
        if check == zlib.crc32(header[: _CHECKED.size]):
            stop = offset + _HEADER.size + int(length)
            return stop > end or (stop == end and self._lacks_a_part(offset + _HEADER.size, end))
        # The file's new length may reach the disk before its content does.
        return self._only_zeros(offset + _HEADER.size, end)

    def _lacks_a_part(self, offset: int, end: int) -> bool:
        """Whether its end, or a page between, never reached the disk: all else that is whole, but wrong, is damage."""
        starts = (end - 1, offset, *range(offset - offset % _PAGE + _PAGE, end, _PAGE))
        return any(self._only_zeros(start, min(end, start - start % _PAGE + _PAGE)) for start in starts)

    def _only_zeros(self, offset: int, end: int) -> bool:
        while offset < end:
            block = os.pread(self._descriptor, min(1 << 20, end - offset), offset)
            if not block or block.count(0) != len(block):
                return False
            offset += len(block)
        return True

    def _cut(self, end: int) -> None:
        self.torn = end - self.size
        tail = os.pread(self._descriptor, self.torn, self.size)
        self.path.with_name(f"torn-{self.path.stem}-{self.size}.bin").write_bytes(tail)
        os.ftruncate(self._descriptor, self.size)
        os.fsync(self._descriptor)


def read_frame(descriptor: int, path: Path, offset: int) -> bytes:
    """The payload of the frame at `offset`, verified.

    Raises:
        Damaged
    """
    header = os.pread(descriptor, _HEADER.size, offset)
    if len(header) < _HEADER.size:
        raise Damaged(path, offset, "the file ends within the header of a frame")
    length, crc, check = _HEADER.unpack(header)
    if check != zlib.crc32(header[: _CHECKED.size]):
        raise Damaged(path, offset, "the frame's header does not match its checksum")
    payload = os.pread(descriptor, length, offset + _HEADER.size)
    if len(payload) != length or zlib.crc32(payload) != crc:
        raise Damaged(path, offset, "the frame does not match its checksum")
    return payload


def frames(path: Path, offsets: Iterable[int] | None = None) -> Iterator[tuple[int, list[AppendRequest]]]:
    """(offset, requests) of the frames at `offsets`; of every frame without.

    Raises:
        Damaged: also when the file ends within a frame.
        FileNotFoundError: the run was removed meanwhile.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for offset in _every(descriptor, path) if offsets is None else offsets:
            yield offset, unpack(read_frame(descriptor, path, offset))
    finally:
        os.close(descriptor)


def _every(descriptor: int, path: Path) -> Iterator[int]:
    end = os.fstat(descriptor).st_size
    if os.pread(descriptor, len(MAGIC), 0) != MAGIC:
        raise Damaged(path, 0, "this is not a file of records")
    offset = len(MAGIC)
    while offset < end:
        yield offset
        (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, offset))
        offset += _HEADER.size + length


def check_frames(path: Path, end: int) -> Iterator[Damaged]:
    """The frames before `end` that are not what was written.

    Behind one whose header is damaged, nobody knows where the next one is: that is found by `salvage`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield Damaged(path, 0, "it is missing")
        return
    try:
        if os.pread(descriptor, len(MAGIC), 0) != MAGIC:
            yield Damaged(path, 0, "this is not a file of records")
        for start, payload, stop in _walk(descriptor, end):
            if payload is None:
                yield Damaged(path, start, f"{stop - start:,} bytes do not match their checksums")
    finally:
        os.close(descriptor)


def salvage(path: Path) -> Iterator[bytes]:
    """The payloads of all frames of a file that are what was written, whatever lies between them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for _, payload, _ in _walk(descriptor, os.fstat(descriptor).st_size):
            if payload is not None:
                yield payload
    finally:
        os.close(descriptor)


def _walk(descriptor: int, end: int) -> Iterator[tuple[int, bytes | None, int]]:
    """(start, payload, end) of frames, in order; payload None of what is none."""
    offset = bad = len(MAGIC)
    while offset < end:
        try:
            payload = read_frame(descriptor, Path(), offset)
        except Damaged:
            offset = _behind(descriptor, offset, end)
            continue
        if bad < offset:
            yield bad, None, offset
        bad = offset + _HEADER.size + len(payload)
        yield offset, payload, bad
        offset = bad
    if bad < end:
        yield bad, None, end


def _behind(descriptor: int, offset: int, end: int) -> int:
    header = os.pread(descriptor, _HEADER.size, offset)
    if len(header) == _HEADER.size:
        length, _, check = _HEADER.unpack(header)
        if check == zlib.crc32(header[: _CHECKED.size]):
            return min(offset + _HEADER.size + int(length), end)
    return _next_header(descriptor, offset + 1, end)


def _next_header(descriptor: int, offset: int, end: int) -> int:
    """Where bytes begin that look like the header of a frame; `end` when there are none."""
    while offset < end:
        window = os.pread(descriptor, _SEARCHED, offset)
        for start in range(len(window) - _HEADER.size + 1):
            length, _, check = _HEADER.unpack_from(window, start)
            if offset + start + _HEADER.size + length <= end and check == zlib.crc32(
                window[start : start + _CHECKED.size]
            ):
                return offset + start
        if len(window) < _SEARCHED:
            return end
        offset += _SEARCHED - _HEADER.size + 1
    return end


def make_frame(requests: Sequence[AppendRequest]) -> bytes:
    """A frame of batches as it is on disk."""
    parts: list[bytes] = []
    for request in requests:
        encoded = request.SerializeToString()
        parts += (_LENGTH.pack(len(encoded)), encoded)
    return frame_of(b"".join(parts))


def frame_of(payload: bytes) -> bytes:
    """A frame as it is on disk."""
    checked = _CHECKED.pack(len(payload), zlib.crc32(payload))
    return b"".join((checked, _LENGTH.pack(zlib.crc32(checked)), payload))


def unpack(payload: bytes) -> list[AppendRequest]:
    """The requests in a frame."""
    requests = []
    view = memoryview(payload)
    offset = 0
    while offset < len(payload):
        (length,) = _LENGTH.unpack_from(payload, offset)
        offset += _LENGTH.size
        requests.append(AppendRequest.FromString(view[offset : offset + length]))  # type: ignore[arg-type]
        offset += length
    return requests
