"""Writing large files past the page cache.

Packs are written once and seldom read soon. Through the page cache a GB costs the kernel as much as everything else
about receiving it, or several times that, and drives out what training wants to keep there. Direct writes take aligned
memory: parts are copied into a buffer of whole blocks, the last block is padded and cut off again.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, LifoQueue

_BUFFER_BYTES = 4 * 1024 * 1024
_BLOCK_BYTES = 4096


class Writer:
    """Writes files durably; may be used by several threads at once. Keeps a buffer for each that wrote at once."""

    def __init__(self) -> None:
        self._buffers: LifoQueue[mmap.mmap] = LifoQueue()

    def write(self, path: Path, parts: Sequence[bytes]) -> None:
        """Makes a file of the parts, one after the other; its content is durable when this returns.

        Raises:
            FileExistsError: there is something at `path`.
            OSError: it cannot be written; nothing is left there.
        """
        descriptor = _open(path)
        try:
            size = sum(map(len, parts))
            # Space first: a full disk is told before anything is written.
            os.posix_fallocate(descriptor, 0, _rounded(size))
            with self._buffer() as buffer:
                _write(descriptor, parts, buffer)
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)

    @contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        try:
            memory = self._buffers.get_nowait()
        except Empty:
            memory = mmap.mmap(-1, _BUFFER_BYTES)
        try:
            with memoryview(memory) as view:
                yield view
        finally:
            self._buffers.put(memory)


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # A file system without direct writes.
    path.unlink(missing_ok=True)
    return os.open(path, flags, 0o600)


def _write(descriptor: int, parts: Sequence[bytes], buffer: memoryview) -> None:
    filled = 0
    for part in parts:
        rest = memoryview(part)
        while rest:
            taken = min(len(rest), len(buffer) - filled)
            buffer[filled : filled + taken] = rest[:taken]
            filled += taken
            rest = rest[taken:]
            if filled == len(buffer):
                _write_all(descriptor, buffer)
                filled = 0
    end = _rounded(filled)
    buffer[filled:end] = bytes(end - filled)
    _write_all(descriptor, buffer[:end])


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _rounded(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
