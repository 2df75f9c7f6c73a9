"""Chunks that need not be fetched, because they are on this machine: in a draft, or in the folder that is synchronised.

Everything is read and hashed; what does not hash to what the manifest says is fetched.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard.artifacts import manifest
from trainyard.artifacts.errors import TargetExists
from trainyard.artifacts.scan import opened


@dataclass(slots=True)
class Wanted:
    """A chunk, and the files and offsets that are to hold it."""

    size: int
    places: list[tuple[pb.File, int]] = field(default_factory=list)


Places = dict[bytes, Wanted]
"""By the hash of the chunk."""


def places_of(files: Iterable[pb.File]) -> Places:
    """Where every chunk of these files goes."""
    places: Places = {}
    for file, offset, chunk in manifest.chunks_of(files):
        places.setdefault(chunk.hash, Wanted(chunk.size)).places.append((file, offset))
    return places


def places_left(tree: Path, files: Iterable[pb.File]) -> Places:
    """Where chunks go that are not in the draft `tree` yet."""
    left: Places = {}
    with opened(tree) as folder:
        for file in files:
            with _reading(folder, file.path) as descriptor:
                for _, offset, chunk in manifest.chunks_of([file]):
                    if _read(descriptor, chunk.hash, chunk.size, offset) is None:
                        left.setdefault(chunk.hash, Wanted(chunk.size)).places.append((file, offset))
    return left


def _read(descriptor: int, hash: bytes, size: int, offset: int) -> bytes | None:
    """The content at a place, when it is the chunk's."""
    from blake3 import blake3

    content = os.pread(descriptor, size, offset) if descriptor >= 0 else b""
    return content if blake3(content).digest() == hash else None


@contextmanager
def _reading(folder: int, path: str) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        yield -1
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def present(target: Path, tree: pb.Manifest) -> list[str]:
    """Those of the tree's paths that are regular files in `target`.

    Raises:
        TargetExists: something there is in the way: a folder where a file goes, or a file or link where a folder goes.
    """
    found = []
    folders = {parent for file in tree.files for parent in _parents(file.path)}
    with opened(target) as root:
        for folder in sorted(folders):
            if (mode := _mode(root, folder)) and not stat.S_ISDIR(mode):
                raise TargetExists(f"{target / folder} is not a folder", hint="move it away: files go below it")
        for file in tree.files:
            mode = _mode(root, file.path)
            if stat.S_ISDIR(mode):
                raise TargetExists(f"{target / file.path} is a folder", hint="move it away: a file goes there")
            if stat.S_ISREG(mode) and not file.symlink:
                found.append(file.path)
    return found


def _mode(root: int, path: str) -> int:
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.lstat(path, dir_fd=root).st_mode
    return 0


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


class Supply:
    """Content of files of a folder, by chunk."""

    def __init__(self, root: Path, files: Iterable[pb.File]) -> None:
        self._root = root
        self._found = {hash: wanted.places[0] for hash, wanted in places_of(files).items()}

    def get(self, hash: bytes, size: int) -> bytes | None:
        """The content of a chunk; None when it is not here, or not any more."""
        if hash not in self._found:
            return None
        file, offset = self._found[hash]
        with opened(self._root) as folder, _reading(folder, file.path) as descriptor:
            return _read(descriptor, hash, size, offset)
