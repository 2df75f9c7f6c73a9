"""What folders take on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = 512  # bytes of `st_blocks`, whatever the file system's own are


@dataclass
class Size:
    """What a folder takes on disk, as `du` counts it.

    Attributes:
        unread: what could not be counted, and why; at most a few.
        unread_count: how many those are.
    """

    bytes: int = 0
    files: int = 0
    unread: list[str] = field(default_factory=list)
    unread_count: int = 0

    def note(self, path: str, why: str) -> None:
        """Something could not be counted."""
        self.unread_count += 1
        if len(self.unread) < _SHOWN:
            self.unread.append(f"{path}: {why}")


_SHOWN = 5


def measure(folder: Path, links: set[tuple[int, int]], give_up_at: float = float("inf")) -> Size:
    """Adds up the blocks of everything at and below a folder. Follows no link and enters no other file system.

    Args:
        links: files with several names that were counted already; grows. A file counts once, however many names it has.
        give_up_at: the time (`time.monotonic`) after which nothing more is read; what is left is noted.
    """
    size = Size()
    try:
        top = folder.lstat()
    except FileNotFoundError:
        return size
    except OSError as error:
        size.note(str(folder), error.strerror or str(error))
        return size
    size.bytes += top.st_blocks * _BLOCK
    left = [str(folder)]
    while left:
        path = left.pop()
        if time.monotonic() > give_up_at:
            size.note(path, "not counted in time")
            break
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    _add(size, entry, top.st_dev, links, left)
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError as error:
            size.note(path, error.strerror or str(error))
    return size


def _add(size: Size, entry: os.DirEntry[str], device: int, links: set[tuple[int, int]], folders: list[str]) -> None:
    try:
        status = entry.stat(follow_symlinks=False)
        if entry.is_dir(follow_symlinks=False):
            if status.st_dev != device:
                size.note(entry.path, "another file system is mounted there")
                return
            folders.append(entry.path)
        else:
            size.files += 1
            if status.st_nlink > 1:
                if (key := (status.st_dev, status.st_ino)) in links:
                    return
                links.add(key)
        size.bytes += status.st_blocks * _BLOCK
    except FileNotFoundError:
        return  # removed meanwhile
    except OSError as error:
        size.note(entry.path, error.strerror or str(error))


def files(folder: Path) -> Iterator[tuple[str, int]]:
    """Names of the files in a folder, and the bytes that each takes on disk; the folder itself as "."."""
    try:
        yield ".", folder.stat().st_blocks * _BLOCK
        with os.scandir(folder) as entries:
            for entry in entries:
                yield entry.name, entry.stat(follow_symlinks=False).st_blocks * _BLOCK
    except FileNotFoundError:
        return  # it was removed meanwhile
