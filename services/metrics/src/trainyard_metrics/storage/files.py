"""Files that are durable, named safely, and there as long as somebody reads them."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from weakref import WeakValueDictionary

from servicekit.disk import sync_folder

MANIFEST = "manifest.json"
TEMPORARY = ".tmp"
DAMAGED = "damaged-"

_SEGMENT = re.compile(r"journal-(\d{8})\.log")
_COLUMNS = re.compile(r"(points|lines)-(\d{8})-(\d{8})(-repaired-\d+)?\.parquet")


class Damaged(Exception):
    """Stored bytes are not what was written."""

    def __init__(self, path: Path, offset: int, what: str) -> None:
        super().__init__(f"{path} is damaged at byte {offset}: {what}")
        self.path = path
        self.offset = offset
        self.what = what


class HeldFile:
    """A file that may be superseded while it is read: the last one who holds this object removes it. See `hold`.

    A crash before that leaves a file that no manifest mentions; opening the run removes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._superseded = False

    def supersede(self) -> None:
        """The file is no longer part of its run. Its name is never used again."""
        self._superseded = True

    def __del__(self) -> None:
        if self._superseded:
            with contextlib.suppress(OSError):
                self.path.unlink()


_held: WeakValueDictionary[Path, HeldFile] = WeakValueDictionary()


def hold(path: Path) -> HeldFile:
    """The file at `path`, the same object for all who hold it, also when its run was closed and opened meanwhile."""
    return _held.setdefault(path, HeldFile(path))


def segment_name(number: int) -> str:
    """The file of a journal segment."""
    return f"journal-{number:08}.log"


def segment_number(name: str) -> int | None:
    """The number in a segment's file name; None for other files."""
    found = _SEGMENT.fullmatch(name)
    return int(found[1]) if found else None


def columns_name(kind: str, first: int, last: int) -> str:
    """The file of the points or lines of segments `first` to `last`."""
    return f"{kind}-{first:08}-{last:08}.parquet"


def repaired_name(name: str, when: int) -> str:
    """What a column file is called that has what could be saved of the file `name`."""
    kind, first, last, _ = _parts(name)
    return f"{kind}-{first}-{last}-repaired-{when}.parquet"


def columns_range(name: str) -> tuple[str, int, int]:
    """Kind, first and last segment of a column file."""
    kind, first, last, _ = _parts(name)
    return kind, int(first), int(last)


def _parts(name: str) -> tuple[str, ...]:
    found = _COLUMNS.fullmatch(name)
    if found is None:
        raise ValueError(f"{name} is not the name of a column file")
    return found.groups()


def is_columns(name: str) -> bool:
    """Whether this is the name of a column file."""
    return _COLUMNS.fullmatch(name) is not None


def replace_durably(path: Path, content: bytes) -> None:
    """Writes a file as a whole: after a crash it is the old one or the new one.

    Raises:
        OSError: the disk is full, or failed; the old one is still there.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        write_all(descriptor, content, 0)
        os.fsync(descriptor)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    temporary.replace(path)
    sync_folder(path.parent)


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Writes everything at an offset.

    Raises:
        OSError
    """
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written
