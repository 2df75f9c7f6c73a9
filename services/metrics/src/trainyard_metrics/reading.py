"""Reading what is stored without getting in the way: snapshots are taken in the event loop and read in threads.

The threads are few and serve readers alone; writers have their own. A stream of answers holds a thread only while it
makes one answer, so that a reader who does not read holds none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from servicekit.errors import NotFound

from trainyard_metrics.runlogs import RunLogs
from trainyard_metrics.storage.files import Damaged
from trainyard_metrics.storage.snapshot import Snapshot

T = TypeVar("T")


class Reader:
    """Snapshots, and threads to read them in."""

    def __init__(self, logs: RunLogs, threads: int) -> None:
        self._logs = logs
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="metrics-query")

    async def snapshot(self, run_id: str, at: Callable[[], None] = lambda: None) -> Snapshot:
        """What is durable of a run.

        Args:
            at: called in the event loop at the moment of the snapshot.

        Raises:
            DataLoss: its files are damaged.
        """
        async with self._logs.use(run_id) as log:
            at()
            return log.snapshot()

    async def snapshots(self, run_ids: Iterable[str]) -> Mapping[str, Snapshot]:
        """Snapshots by run.

        Raises:
            DataLoss: see `snapshot`.
        """
        return {run_id: await self.snapshot(run_id) for run_id in run_ids}

    async def run(self, read: Callable[[], T]) -> T:
        """What a blocking function returns that reads snapshots.

        Raises:
            DataLoss: stored bytes are not what was written.
            NotFound: the run was removed meanwhile.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        except Damaged as damage:
            raise self._logs.lost(damage.path.parent.name, damage) from damage
        except FileNotFoundError as error:
            raise removed() from error

    def close(self) -> None:
        """Waits for reads that are under way."""
        self._threads.shutdown(cancel_futures=True)


def removed() -> NotFound:
    """The error for a run that was removed while it was read."""
    return NotFound("the run was removed meanwhile", reason="RunNotFound", hint="list the runs")
