"""A folder that is written piece by piece and appears when it is whole."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO

from trainyard_protos.v1 import admin_pb2 as pb

from trainyard import errors


class Copy:
    """The folder of a backup, written under another name beside it.

    Raises (every method):
        InvalidArgument: the folder is there already and not empty, or cannot be written.
    """

    def __init__(self, target: Path) -> None:
        self._target = target.absolute()
        self._draft = self._target.with_name(f".{self._target.name}.{os.getpid()}")
        self._file: IO[bytes] | None = None
        self._path: str | None = None
        self.files = 0
        self.bytes = 0
        _checked(self._begin, self._target)

    def _begin(self) -> None:
        if self._target.exists() and (not self._target.is_dir() or any(self._target.iterdir())):
            raise errors.InvalidArgument(
                f"{self._target} is there already and not an empty folder",
                reason="NotEmpty",
                hint="name a folder that does not exist yet",
            )
        self._draft.mkdir(mode=0o700, parents=True)

    async def add(self, piece: pb.BackupResponse) -> None:
        await asyncio.to_thread(_checked, lambda: self._add(piece), self._target)

    def _add(self, piece: pb.BackupResponse) -> None:
        if piece.path != self._path:
            self._close()
            self._open(piece.path)
        assert self._file is not None
        self._file.write(piece.data)
        self.bytes += len(piece.data)

    def _open(self, path: str) -> None:
        relative = PurePosixPath(path)
        if relative.is_absolute() or ".." in relative.parts or not relative.parts:
            raise errors.Defect(f"the yard sends a file with a path that leads elsewhere: '{path}'")
        file = self._draft / relative
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self._path = path
        self.files += 1

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    async def finish(self) -> None:
        """Makes the folder appear."""
        await asyncio.to_thread(_checked, self._finish, self._target)

    def _finish(self) -> None:
        self._close()
        for folder in [*(path for path in self._draft.rglob("*") if path.is_dir()), self._draft]:
            _sync(folder)
        self._draft.rename(self._target)
        _sync(self._target.parent)

    async def discard(self) -> None:
        """Removes what is not whole; nothing, when it is."""
        await asyncio.to_thread(self._discard)

    def _discard(self) -> None:
        if self._file is not None:
            self._file.close()
        shutil.rmtree(self._draft, ignore_errors=True)


def _checked(work: Callable[[], None], target: Path) -> None:
    try:
        work()
    except OSError as error:
        raise errors.InvalidArgument(
            f"{error.filename or target}: {error.strerror}", reason="BackupNotWritten", hint="nothing of it is left"
        ) from error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
