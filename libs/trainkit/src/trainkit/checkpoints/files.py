"""Files that are on disk when we say so, with their checksums."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A file as it was written."""

    name: str
    size: int
    sha256: str


def write(path: Path, parts: Iterable[bytes | memoryview]) -> Stored:
    """Writes a new file and returns when it is durable."""
    digest = hashlib.sha256()
    size = 0
    with path.open("wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part)
            for at in range(0, len(view), _PIECE):  # small enough to be hashed and written from the processor's cache
                piece = view[at : at + _PIECE]
                digest.update(piece)
                written = 0
                while written < len(piece):
                    written += file.write(piece[written:])
            size += len(view)
        os.fsync(file.fileno())
    return Stored(path.name, size, digest.hexdigest())


def check_writable(folder: Path) -> None:
    """Makes a folder if it is not there, and writes a file in it that is gone at once.

    Raises:
        OSError: nothing can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"\0")
        probe.flush()


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder are durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
