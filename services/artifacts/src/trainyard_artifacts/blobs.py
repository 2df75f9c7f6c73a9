"""Where the bytes of chunks are. One folder now; anything with these five methods can take its place.

chunks/<workspace>/ab/<hash>      a chunk, named by the hash of its bytes
chunks/<workspace>/tmp/           chunks being written
chunks/<workspace>/ab/<hash>.damaged  what was found damaged, put aside, so that sending the chunk again heals it
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from blake3 import blake3
from servicekit.errors import ResourceExhausted, ServiceError, Unavailable

T = TypeVar("T")

_TEMPORARY = "tmp"
_HEX_LENGTH = 64


class ChunkMissing(Exception):
    """The chunk is not there."""


class ChunkDamaged(Exception):
    """The bytes there are not those that were stored."""


class BlobStore(Protocol):
    """Chunks by workspace and hash. Whoever asks for or puts a chunk keeps it from being swept for the grace time."""

    async def missing(self, workspace: str, hashes: Collection[bytes]) -> list[bytes]:
        """Those of `hashes` that are not there; the others are renewed."""

    async def put(self, workspace: str, chunks: Sequence[tuple[bytes, bytes]]) -> int:
        """Keeps (hash, data) pairs durably; returns how many were new. Hashes are the caller's to check."""

    async def get(self, workspace: str, hash: bytes) -> bytes:
        """The verified bytes. Raises ChunkMissing or ChunkDamaged."""

    async def sweep(self, workspace: str, used: Container[bytes], grace_s: float) -> int:
        """Removes chunks that are not `used` and were not renewed for `grace_s`; returns how many."""

    async def workspaces(self) -> list[str]:
        """Workspaces that have chunks."""


class DiskBlobStore:
    """Chunks as files below `root`.

    A chunk's modification time is when it was last asked for. Renewing and sweeping exclude each other, so that a chunk
    reported as present is not removed right after.
    """

    def __init__(self, root: Path, threads: int = 4) -> None:
        self._root = root
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="chunks")
        self._renewal = threading.Lock()

    async def missing(self, workspace: str, hashes: Collection[bytes]) -> list[bytes]:
        return await self._run(lambda: [hash for hash in hashes if not self._renew(self._path(workspace, hash))])

    async def put(self, workspace: str, chunks: Sequence[tuple[bytes, bytes]]) -> int:
        return await self._run(lambda: self._put(workspace, chunks))

    async def get(self, workspace: str, hash: bytes) -> bytes:
        return await self._run(lambda: self._get(self._path(workspace, hash), hash))

    async def sweep(self, workspace: str, used: Container[bytes], grace_s: float) -> int:
        return await self._run(lambda: self._sweep(workspace, used, grace_s))

    async def workspaces(self) -> list[str]:
        return await self._run(
            lambda: sorted(entry.name for entry in self._root.iterdir()) if self._root.is_dir() else []
        )

    def close(self) -> None:
        """Ends the threads, after what they do now."""
        self._pool.shutdown(wait=True)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except OSError as error:
            raise _translate(error) from error

    def _path(self, workspace: str, hash: bytes) -> Path:
        name = hash.hex()
        return self._root / workspace / name[:2] / name

    def _renew(self, path: Path) -> bool:
        with self._renewal:
            try:
                os.utime(path)
            except FileNotFoundError:
                return False
            return True

    def _put(self, workspace: str, chunks: Sequence[tuple[bytes, bytes]]) -> int:
        temporary = self._root / workspace / _TEMPORARY
        temporary.mkdir(parents=True, exist_ok=True, mode=0o700)
        changed: set[Path] = set()
        new = 0
        for hash, data in chunks:
            path = self._path(workspace, hash)
            if self._renew(path):
                continue
            if not path.parent.is_dir():
                path.parent.mkdir(exist_ok=True, mode=0o700)
                changed.add(path.parent.parent)
            _write_durably(temporary / secrets.token_hex(16), path, data)
            changed.add(path.parent)
            new += 1
        for folder in changed:
            _sync_folder(folder)
        return new

    def _get(self, path: Path, hash: bytes) -> bytes:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise ChunkMissing(hash.hex()) from None
        if blake3(data).digest() != hash:
            with suppress(FileNotFoundError):  # another reader was first
                path.rename(path.with_name(f"{path.name}.damaged"))
            raise ChunkDamaged(hash.hex())
        return data

    def _sweep(self, workspace: str, used: Container[bytes], grace_s: float) -> int:
        removed = 0
        for path in self._files(workspace):
            if path.parent.name != _TEMPORARY and (len(path.name) != _HEX_LENGTH or bytes.fromhex(path.name) in used):
                continue
            with self._renewal, suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - grace_s:
                    path.unlink()
                    removed += 1
        return removed

    def _files(self, workspace: str) -> Iterator[Path]:
        for folder in sorted((self._root / workspace).iterdir()):
            yield from sorted(folder.iterdir())


def _write_durably(temporary: Path, path: Path, data: bytes) -> None:
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _translate(error: OSError) -> ServiceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted(
            "the disk of the artifact store is full",
            reason="DiskFull",
            hint="free space; what was stored before is intact",
        )
    return Unavailable(
        f"the disk of the artifact store failed: {error}",
        reason="StorageFailed",
        hint="look at the disk, then try again",
    )
