"""Copies of what a service keeps, taken while it works.

A service's `Backup` method sends a snapshot of its database first and then the files that the snapshot speaks of. Paths
are those below TRAINYARD_HOME, so that a copy put into an empty home is a yard again.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainyard_protos.v1.admin_pb2 import BackupResponse

from servicekit.errors import DataLoss, FailedPrecondition
from servicekit.events import AdminEvent

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

PIECE_BYTES = 1024 * 1024
"""Most bytes of a file in one message."""

T = TypeVar("T")


def snapshot_sqlite(engine: Engine, target: Path) -> None:
    """Writes a consistent copy of a database to `target`, durable on return; readers and writers go on meanwhile.

    Raises:
        FailedPrecondition: the database is not SQLite.
        FileExistsError: there is something at `target`.
        OSError, sqlite3.Error: the copy cannot be written; nothing is left at `target`.
    """
    _require_sqlite(engine)
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        _copy(engine, target)
        _sync(target)
        _sync(target.parent)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _require_sqlite(engine: Engine) -> None:
    if engine.dialect.name != "sqlite":
        raise FailedPrecondition(
            f"the database is {engine.dialect.name}, which has tools of its own for backups",
            reason="NotSqlite",
            hint="use pg_dump for the database, and copy the files that the service keeps beside it",
        )


def _copy(engine: Engine, target: Path) -> None:
    source = engine.raw_connection()
    try:
        with closing(sqlite3.connect(target)) as copy:
            # All pages in one step: several would begin anew at every commit in between.
            source.driver_connection.backup(copy)  # type: ignore[union-attr]
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, whole without another beside it
    finally:
        source.close()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stream_files(root: Path, paths: Iterable[Path]) -> Iterator[BackupResponse]:
    """The files in pieces, one after the other; an empty file is one piece without bytes.

    A file that grows meanwhile is sent as long as it was when its turn came.

    Args:
        root: what the paths of the answers are relative to.
        paths: relative to `root`.

    Raises:
        DataLoss: a file became shorter than it was.
        OSError: a file cannot be read.
    """
    for path in paths:
        with (root / path).open("rb") as file:
            left = os.fstat(file.fileno()).st_size
            while True:
                data = file.read(min(left, PIECE_BYTES))
                left -= len(data)
                if left and len(data) < PIECE_BYTES:
                    raise DataLoss(
                        f"{path} became shorter while it was copied",
                        reason="FileChanged",
                        hint="begin the backup again",
                    )
                yield BackupResponse(path=path.as_posix(), data=data)
                if not left:
                    break


def database_and_files(
    engine: Engine, name: str, root: Path, paths: Callable[[], Iterable[Path]] = tuple
) -> Iterator[BackupResponse]:
    """A snapshot of a SQLite database as the file `name`, then the files that `paths` lists once it is taken.

    Args:
        root: folder of the yard; the snapshot lies there until it is sent.
        paths: relative to `root`; called after the snapshot, so that what it speaks of is among them.
    """
    with tempfile.TemporaryDirectory(prefix=".backup-", dir=root) as folder:
        snapshot_sqlite(engine, Path(folder) / name)
        yield from stream_files(Path(folder), [Path(name)])
    yield from stream_files(root, paths())


async def recorded(
    engine: Engine, pieces: AsyncIterator[BackupResponse], record: Callable[[AdminEvent, str], Awaitable[None]]
) -> AsyncIterator[BackupResponse]:
    """The pieces of a backup, with an event before the first of them and one after the last.

    Args:
        engine: of the service's database.
        record: stores an event with this message.

    Raises:
        FailedPrecondition: the database is not SQLite; nothing is recorded.
    """
    _require_sqlite(engine)
    await record(AdminEvent.BACKUP_STARTED, "")
    size, paths = 0, set()
    async for piece in pieces:
        size += len(piece.data)
        paths.add(piece.path)
        yield piece
    await record(AdminEvent.BACKUP_TAKEN, f"{size:,} bytes in {len(paths):,} files")


async def in_threads(items: Iterator[T]) -> AsyncIterator[T]:
    """The items of a blocking iterator, each waited for in a thread; leaving early closes the iterator."""
    end = object()
    loop = asyncio.get_running_loop()
    step: asyncio.Future[Any] | None = None
    try:
        while True:
            step = loop.run_in_executor(None, next, items, end)
            item = await asyncio.shield(step)
            if item is end:
                return
            yield item
    finally:
        if step is not None:
            await asyncio.wait({step})  # a generator that runs cannot be closed
        if close := getattr(items, "close", None):
            await loop.run_in_executor(None, close)
