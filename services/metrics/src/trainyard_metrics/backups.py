"""A copy of everything, taken while runs are written.

The database is copied first and sent last. What is written in between is in the copied files and not in the copied
summaries, so those runs are marked in the copy: whoever starts from it makes their summaries anew.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import closing
from pathlib import Path

from servicekit.backup import PIECE_BYTES, in_threads, snapshot_sqlite, stream_files
from servicekit.store import Store
from trainyard_protos.v1.admin_pb2 import BackupResponse

from trainyard_metrics.summaries import Summaries
from trainyard_metrics.upkeep import Upkeep

DATABASE = "metrics.db"


class Backups:
    """Makes copies.

    Args:
        home: folder of the yard; a copy's database lies there until it is sent.
    """

    def __init__(self, store: Store, upkeep: Upkeep, summaries: Summaries, home: Path) -> None:
        self._store = store
        self._upkeep = upkeep
        self._summaries = summaries
        self._home = home

    async def stream(self) -> AsyncIterator[BackupResponse]:
        """The files of a copy, in pieces.

        Raises:
            FailedPrecondition: the database is not SQLite.
            DataLoss: records are damaged.
        """
        with tempfile.TemporaryDirectory(prefix=".backup-", dir=self._home) as folder, self._summaries.written() as new:
            database = Path(folder) / DATABASE
            await asyncio.to_thread(snapshot_sqlite, self._store.engine, database)
            known = set(await asyncio.to_thread(_run_ids, database))
            for run_id in sorted(known & set(await self._upkeep.run_ids())):
                async for piece in self._run(run_id):
                    yield piece
            await asyncio.to_thread(_mark, database, new)
            async for piece in in_threads(stream_files(Path(folder), [Path(DATABASE)])):
                yield piece

    async def _run(self, run_id: str) -> AsyncIterator[BackupResponse]:
        async with self._upkeep.copies(run_id) as copies:
            for copy in copies:
                async for piece in in_threads(copy.pieces(PIECE_BYTES)):
                    yield BackupResponse(path=f"runs/{run_id}/{copy.name}", data=piece)


def _run_ids(database: Path) -> Sequence[str]:
    with closing(sqlite3.connect(database)) as copy:
        return [run_id for (run_id,) in copy.execute("SELECT id FROM metrics_run")]


def _mark(database: Path, run_ids: Iterable[str]) -> None:
    with closing(sqlite3.connect(database)) as copy, copy:
        copy.executemany("UPDATE metrics_run SET dirty = 1 WHERE id = ?", [(run_id,) for run_id in run_ids])
