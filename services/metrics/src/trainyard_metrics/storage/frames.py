"""The format of journal segments: files of frames, each verified by itself.

    file   := "TYRECS2\\n" frame*
    frame  := length:u32 crc(payload):u32 crc(length, crc):u32 payload      (little endian, CRC-32 as in zlib)
    payload:= (length:u32 AppendRequest)*

A frame is what was written with one fsync.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trainyard_protos.v1.metrics_pb2 import AppendRequest

from trainyard_metrics.storage.files import Damaged

MAGIC = b"TYRECS2\n"
HEADER_BYTES = 12
_HEADER = struct.Struct("<III")
_CHECKED = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_SEARCHED = 1024 * 1024


def payload_length(header: bytes) -> int | None:
    """Bytes behind a header, as it says; None when these bytes are no header."""
    if len(header) < HEADER_BYTES:
        return None
    length, _, check = _HEADER.unpack(header)
    return int(length) if check == zlib.crc32(header[: _CHECKED.size]) else None


def read_frame(descriptor: int, path: Path, offset: int) -> bytes:
    """The payload of the frame at `offset`, verified.

    Raises:
        Damaged
    """
    header = os.pread(descriptor, HEADER_BYTES, offset)
    if len(header) < HEADER_BYTES:
        raise Damaged(path, offset, "the file ends within the header of a frame")
    length = payload_length(header)
    if length is None:
        raise Damaged(path, offset, "the frame's header does not match its checksum")
    payload = os.pread(descriptor, length, offset + HEADER_BYTES)
    if len(payload) != length or zlib.crc32(payload) != _HEADER.unpack(header)[1]:
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
        offset += HEADER_BYTES + length


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
        bad = offset + HEADER_BYTES + len(payload)
        yield offset, payload, bad
        offset = bad
    if bad < end:
        yield bad, None, end


def _behind(descriptor: int, offset: int, end: int) -> int:
    length = payload_length(os.pread(descriptor, HEADER_BYTES, offset))
    return _next_header(descriptor, offset + 1, end) if length is None else min(offset + HEADER_BYTES + length, end)


def _next_header(descriptor: int, offset: int, end: int) -> int:
    """Where bytes begin that look like the header of a frame; `end` when there are none."""
    while offset < end:
        window = os.pread(descriptor, _SEARCHED, offset)
        for start in range(len(window) - HEADER_BYTES + 1):
            length, _, check = _HEADER.unpack_from(window, start)
            if offset + start + HEADER_BYTES + length <= end and check == zlib.crc32(
                window[start : start + _CHECKED.size]
            ):
                return offset + start
        if len(window) < _SEARCHED:
            return end
        offset += _SEARCHED - HEADER_BYTES + 1
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
