"""An append-only file of frames: what was acknowledged stays, what a crash tore is cut off, what is damaged is found.

    file   := "TYRECS2\\n" frame*
    frame  := length:u32 crc(payload):u32 crc(length, crc):u32 payload      (little endian, CRC-32 as in zlib)
    payload:= (length:u32 AppendRequest)*

A frame is what was written with one fsync. A crash can tear the last frame alone, because the next is written only
after the fsync; so a bad frame at the end of the file was never acknowledged, and a bad one before other bytes is
damage.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainyard_protos.v1.metrics_pb2 import AppendRequest

MAGIC = b"TYRECS2\n"
_HEADER = struct.Struct("<III")
_CHECKED = struct.Struct("<II")
_LENGTH = struct.Struct("<I")


class Damaged(Exception):
    """Stored bytes are not what was written."""

    def __init__(self, path: Path, offset: int, what: str) -> None:
        super().__init__(f"{path} is damaged at byte {offset}: {what}")
        self.path = path
        self.offset = offset


class Journal:
    """One file. Not for several threads at once, except `read`.

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
            yield offset, _unpack(payload)

    def append(self, requests: Sequence[AppendRequest]) -> int:
        """Writes one frame, durably; returns its offset. After an error nothing of it is there.

        Raises:
            OSError: the disk is full, or failed.
        """
        frame = _frame(requests)
        offset = self.size
        try:
            _write_all(self._descriptor, frame, offset)
            os.fdatasync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, offset)
            raise
        self.size += len(frame)
        return offset

    def read(self, offset: int) -> list[AppendRequest]:
        """The requests of the frame at `offset`, verified.

        Raises:
            Damaged
        """
        payload = self._read_frame(offset)
        if payload is None:
            raise Damaged(self.path, offset, "the frame does not match its checksum")
        return _unpack(payload)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def _begin(self, end: int) -> None:
        # The header is written with the first frame's fsync: a short or empty file was never acknowledged.
        if end > len(MAGIC):
            raise Damaged(self.path, 0, "this is not a file of records")
        _write_all(self._descriptor, MAGIC, 0)
        os.fsync(self._descriptor)
        for folder in (self.path.parent, self.path.parent.parent):
            _sync_folder(folder)
        self.size = len(MAGIC)

    def _recover_frame(self, end: int) -> bytes | None:
        header = os.pread(self._descriptor, _HEADER.size, self.size)
        if len(header) < _HEADER.size:
            return None
        length, _, check = _HEADER.unpack(header)
        if check != zlib.crc32(header[: _CHECKED.size]):
            # The file's new length may reach the disk before its content does.
            if self._only_zeros(self.size + _HEADER.size, end):
                return None
            raise Damaged(self.path, self.size, "the frame's header does not match its checksum")
        payload = self._read_frame(self.size)
        if payload is None and self.size + _HEADER.size + length < end:
            raise Damaged(self.path, self.size, "the frame does not match its checksum")
        return payload

    def _read_frame(self, offset: int) -> bytes | None:
        header = os.pread(self._descriptor, _HEADER.size, offset)
        if len(header) < _HEADER.size:
            return None
        length, crc, check = _HEADER.unpack(header)
        if check != zlib.crc32(header[: _CHECKED.size]):
            return None
        payload = os.pread(self._descriptor, length, offset + _HEADER.size)
        return payload if len(payload) == length and zlib.crc32(payload) == crc else None

    def _only_zeros(self, offset: int, end: int) -> bool:
        while offset < end:
            block = os.pread(self._descriptor, 1 << 20, offset)
            if not block or block.count(0) != len(block):
                return False
            offset += len(block)
        return True

    def _cut(self, end: int) -> None:
        self.torn = end - self.size
        tail = os.pread(self._descriptor, self.torn, self.size)
        self.path.with_name(f"torn-{self.size}.bin").write_bytes(tail)
        os.ftruncate(self._descriptor, self.size)
        os.fsync(self._descriptor)


def _frame(requests: Sequence[AppendRequest]) -> bytes:
    parts: list[bytes] = []
    for request in requests:
        encoded = request.SerializeToString()
        parts += (_LENGTH.pack(len(encoded)), encoded)
    payload = b"".join(parts)
    checked = _CHECKED.pack(len(payload), zlib.crc32(payload))
    return checked + _LENGTH.pack(zlib.crc32(checked)) + payload


def _unpack(payload: bytes) -> list[AppendRequest]:
    requests = []
    offset = 0
    while offset < len(payload):
        (length,) = _LENGTH.unpack_from(payload, offset)
        offset += _LENGTH.size
        requests.append(AppendRequest.FromString(payload[offset : offset + length]))
        offset += length
    return requests


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
