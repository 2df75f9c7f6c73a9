"""Reading trees: files into pages of chunks, cut and hashed on the way, each byte read once.

Runs on a thread. Paths are relative to an open folder, so that they may be as long as the system allows. Files are
read, never mapped: a mapped file that shrinks kills its reader.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard.artifacts.chunking import Cutter
from trainyard.artifacts.errors import FileChanged, UnsafePath
from trainyard.artifacts.pages import Page, Pages, Piece
from trainyard.artifacts.paths import check_link

_PERMISSIONS = 0o777


def scan(root: Path, names: Sequence[str], pages: Pages) -> list[pb.File]:
    """The manifest entries of files and links below `root`; their content goes over in `pages`.

    Raises:
        UnsafePath: one is neither a regular file nor a link that stays inside of the tree.
        FileChanged: a file changed while it was read.
        OSError: a file is gone or cannot be read; its whole path is in `filename`.
        Closed: nobody takes pages any more.
    """
    reader = _Reader(pages)
    with opened(root) as folder:
        files = [_entry(reader, root, folder, name) for name in names]
    reader.finish()
    return files


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder, for paths relative to it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _entry(reader: _Reader, root: Path, folder: int, name: str) -> pb.File:
    try:
        status = os.lstat(name, dir_fd=folder)
        if stat.S_ISLNK(status.st_mode):
            return _link(name, os.readlink(name, dir_fd=folder))
        if not stat.S_ISREG(status.st_mode):
            raise UnsafePath(f"{root / name} is not a regular file", hint="leave sockets, pipes and devices out")
        return _file(reader, root, folder, name)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(root / name)) from error


def _link(name: str, target: str) -> pb.File:
    check_link(name, target)
    return pb.File(path=name, mode=_PERMISSIONS, symlink=target)


def _file(reader: _Reader, root: Path, folder: int, name: str) -> pb.File:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # it may have become a link or a pipe meanwhile
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        before = os.fstat(descriptor)
        chunks = reader.read(descriptor, before.st_size)
        after = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    size = sum(chunk.size for chunk in chunks)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or size != before.st_size:
        raise FileChanged(
            f"{root / name} changed while it was read", hint="write to a temporary name and rename it when complete"
        )
    return pb.File(path=name, size=size, mode=stat.S_IMODE(before.st_mode) & _PERMISSIONS, chunks=chunks)


class _Reader:
    """Puts content into pages and cuts it there."""

    def __init__(self, pages: Pages) -> None:
        from blake3 import blake3

        self._hash = blake3
        self._cutter = Cutter()
        self._pages = pages
        self._page: Page | None = None

    def read(self, descriptor: int, size: int) -> list[pb.ChunkRef]:
        """The chunks of a file of `size` bytes; fewer when it turns out to be shorter."""
        chunks: list[pb.ChunkRef] = []
        page = self._open_page()
        start, left = page.used, size  # content from `start` on is not cut yet
        while left:
            if page.full:
                page, start = self._turn(page, start), 0
            count = os.readv(descriptor, [page.room[:left]])
            page.used += count
            left = left - count if count else 0
            start += self._cut(page, start, chunks, final=not left)
        return chunks

    def finish(self) -> None:
        """Hands over what is left."""
        if self._page is not None:
            self._pages.hand_over(self._page)
        self._pages.hand_over(None)

    def _open_page(self) -> Page:
        if self._page is None:
            self._page = self._pages.borrow()
        elif self._page.full:
            self._page = self._turn(self._page, self._page.used)
        return self._page

    def _turn(self, page: Page, start: int) -> Page:
        """Hands the page over; what is not cut yet begins the next one."""
        fresh = self._pages.borrow()
        rest = page.content[start : page.used]
        fresh.content[: len(rest)] = rest
        fresh.used = len(rest)
        page.used = start
        self._pages.hand_over(page)
        self._page = fresh
        return fresh

    def _cut(self, page: Page, start: int, chunks: list[pb.ChunkRef], *, final: bool) -> int:
        """Cuts what can be cut; returns how many bytes that were."""
        at = start
        for size in self._cutter.sizes(page.content[start : page.used], final=final):
            hash = self._hash(page.content[at : at + size]).digest()
            page.pieces.append(Piece(hash, at, size))
            chunks.append(pb.ChunkRef(hash=hash, size=size))
            at += size
        return at - start
