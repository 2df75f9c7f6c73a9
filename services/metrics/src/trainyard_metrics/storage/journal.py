"""The segment that grows: what was acknowledged stays, what a crash tore is cut off, what is damaged is found.

A crash can tear the last frame alone, because the next is written only after the fsync. A last frame that is short, or
has zeros where its end or a page never reached the disk, was torn and never acknowledged; one that is bad in any other
way, or anywhere else, is damage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from servicekit.disk import sync_folder
from trainyard_protos.v1.metrics_pb2 import AppendRequest

from trainyard_metrics.storage.files import Damaged, write_all
from trainyard_metrics.storage.frames import HEADER_BYTES, MAGIC, make_frame, payload_length, read_frame, unpack

_PAGE = 4096


class Journal:
    """The file that grows. Not for several threads at once.

    Args:
        read_only: the file is there, and is not changed.

    Attributes:
        size: bytes that are durable.
        torn: bytes of an unfinished write, cut off when the file was opened; a copy lies beside the file.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._read_only = read_only
        self.size = 0
        self.torn = 0
        if read_only:
            self._descriptor = os.open(path, os.O_RDONLY)
            return
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
            self.size += HEADER_BYTES + len(payload)
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
        if self._read_only:
            return
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
        header = os.pread(self._descriptor, HEADER_BYTES, offset)
        if len(header) < HEADER_BYTES:
            return True
        length = payload_length(header)
        if length is None:  # the file's new length may reach the disk before its content does
            return self._only_zeros(offset + HEADER_BYTES, end)
        stop = offset + HEADER_BYTES + length
        return stop > end or (stop == end and self._lacks_a_part(offset + HEADER_BYTES, end))

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
        if self._read_only:
            return
        tail = os.pread(self._descriptor, self.torn, self.size)
        self.path.with_name(f"torn-{self.path.stem}-{self.size}.bin").write_bytes(tail)
        os.ftruncate(self._descriptor, self.size)
        os.fsync(self._descriptor)
