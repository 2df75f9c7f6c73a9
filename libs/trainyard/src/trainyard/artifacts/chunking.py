"""Files into chunks: cut where the content says so (FastCDC), named by BLAKE3.

Because cuts depend on content alone, an insertion moves bytes but keeps most chunks, and only new ones are sent. Small
files are one chunk. Files are read, never mapped: a mapped file that shrinks kills its reader.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard.artifacts.errors import FileChanged, UnsafePath

MIN_BYTES = 256 * 1024
AVERAGE_BYTES = 1024 * 1024
MAX_BYTES = 4 * 1024 * 1024
_WINDOW_BYTES = 2 * MAX_BYTES


def split(data: bytes) -> Iterator[tuple[int, int]]:
    """Where content-defined chunks lie in `data`: (offset, size) of each."""
    from fastcdc.fastcdc_cy import fastcdc_cy

    for cut in fastcdc_cy(data, MIN_BYTES, AVERAGE_BYTES, MAX_BYTES):
        yield cut.offset, cut.length


def read_chunks(file: BinaryIO) -> Iterator[bytes]:
    """The chunks of a file, in order. The same content gives the same chunks, however it is read."""
    buffer = b""
    while True:
        fresh = file.read(_WINDOW_BYTES - len(buffer))
        buffer += fresh
        if not buffer:
            return
        taken = 0
        for offset, size in split(buffer) if len(buffer) > MIN_BYTES else ((0, len(buffer)),):
            # A cut is final once a whole chunk's worth of content was there to decide it, or the file is over.
            if fresh and len(buffer) - offset < MAX_BYTES:
                break
            yield buffer[offset : offset + size]
            taken = offset + size
        buffer = buffer[taken:]


def describe(root: Path, path: str) -> pb.File:
    """The manifest entry of one file or link below `root`.

    Raises:
        UnsafePath: it is neither a regular file nor a link.
        FileChanged: it changed while it was read.
    """
    full = root / path
    status = full.lstat()
    if stat.S_ISLNK(status.st_mode):
        return pb.File(path=path, mode=0o777, symlink=str(full.readlink()))
    if not stat.S_ISREG(status.st_mode):
        raise UnsafePath(f"{full} is not a regular file", hint="leave sockets, pipes and devices out")
    refs = list(_hash_chunks(full))
    after = full.stat()
    size = sum(ref.size for ref in refs)
    if (status.st_size, status.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or size != status.st_size:
        raise FileChanged(
            f"{full} changed while it was read", hint="write to a temporary name and rename it when complete"
        )
    return pb.File(path=path, size=size, mode=stat.S_IMODE(status.st_mode) & 0o777, chunks=refs)


def _hash_chunks(path: Path) -> Iterator[pb.ChunkRef]:
    from blake3 import blake3

    with path.open("rb", buffering=0) as file:
        for chunk in read_chunks(file):
            yield pb.ChunkRef(hash=blake3(chunk).digest(), size=len(chunk))
