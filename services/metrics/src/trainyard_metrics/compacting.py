"""Compaction: runs turn from journals into column files, one at a time, behind everything else.

A run's turn comes when its journal goes on in a new segment, or when it has been quiet for a while and holds enough.
Files are merged when there are several of one level, so that their number grows with the logarithm of what is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from servicekit.errors import NotFound, ServiceError

from trainyard_metrics.counters import Counters
from trainyard_metrics.domain.schedule import Schedule
from trainyard_metrics.runlog import RunLog
from trainyard_metrics.settings import Settings
from trainyard_metrics.storage.files import Damaged
from trainyard_metrics.storage.manifest import ColumnFile, Manifest
from trainyard_metrics.storage.worker import Compactor, CompactorFailed

logger = logging.getLogger(__name__)


class Compactions:
    """Compacts runs in the background. Belongs to the event loop."""

    def __init__(
        self, use: Callable[[str], AbstractAsyncContextManager[RunLog]], settings: Settings, counters: Counters
    ) -> None:
        self._use = use
        self._settings = settings
        self._counters = counters
        self._compactor = Compactor()
        self._schedule = Schedule(settings.quiet_s)
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def written(self, run_id: str) -> None:
        """The run got records."""
        self._schedule.written(run_id, _now())
        self._start()

    def ready(self, run_id: str) -> None:
        """The run has closed segments."""
        self._schedule.ready(run_id)
        self._start()
        self._changed.set()

    async def compact(self, run_id: str, least_bytes: int) -> None:
        """Compacts a run as far as it goes, now.

        Args:
            least_bytes: a journal of this size is closed first.

        Raises:
            ServiceError: the run cannot be opened.
            Damaged, OSError, CompactorFailed: nothing has changed since the last step that worked.
        """
        async with self._use(run_id) as log, log.compacting:
            await log.roll(least_bytes)
            try:
                while await self._step(log):
                    pass
            except BaseException:
                await log.blocking(log.folder.sweep)
                raise

    def forget(self, run_id: str) -> None:
        """The run is gone."""
        self._schedule.forget(run_id)

    async def close(self) -> None:
        """Ends what runs; it changes nothing."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._compactor.close()

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="compaction")

    async def _run(self) -> None:
        while True:
            run_id = self._schedule.take(_now())
            if run_id is None:
                await self._wait()
            else:
                await self._try(run_id)
            self._counters.compactions_waiting.set(self._schedule.waiting)

    async def _wait(self) -> None:
        wait_s = self._schedule.due() - _now()
        with contextlib.suppress(TimeoutError):
            # Not wait_for: in Python 3.11 it forgets that its task was cancelled when the change comes at that moment.
            async with asyncio.timeout(None if wait_s == float("inf") else max(wait_s, 0)):
                await self._changed.wait()
        self._changed.clear()

    async def _try(self, run_id: str) -> None:
        try:
            await self.compact(run_id, self._settings.min_compacted_bytes)
        except NotFound:
            self._schedule.forget(run_id)
        except (ServiceError, Damaged, OSError, CompactorFailed) as error:
            self._counters.compactions_failed.inc()
            self._schedule.failed(run_id, _now())
            logger.error("compaction failed", extra={"run": run_id}, exc_info=error)
        else:
            self._schedule.done(run_id)

    async def _step(self, log: RunLog) -> bool:
        if len(log.state.segments) > 1:
            await self._compact_oldest(log)
            return True
        files = mergeable(log.state.manifest, self._settings)
        if files:
            await self._merge(log, files)
        return bool(files)

    async def _compact_oldest(self, log: RunLog) -> None:
        segment = log.state.segments[0]
        with self._counters.compaction_seconds.labels("segment").time():
            made = await self._compactor.compact(log.folder.path, segment.number)
            await log.switch(log.state.compacted(segment, made), made)

    async def _merge(self, log: RunLog, files: list[ColumnFile]) -> None:
        with self._counters.compaction_seconds.labels("merge").time():
            made = await self._compactor.merge(log.folder.path, files)
            await log.switch(log.state.manifest.exchange({file.name for file in files}, tuple(made.files)), made)


def mergeable(manifest: Manifest, settings: Settings) -> list[ColumnFile]:
    """Neighbouring files of one kind and level that are to become one; empty when there are too few."""
    for kind in ("points", "lines"):
        same: list[ColumnFile] = []
        for file in manifest.of_kind(kind):
            if same and file.level != same[0].level:
                same = []
            same.append(file)
            if len(same) == settings.merged_files:
                if sum(member.size for member in same) <= settings.max_column_bytes:
                    return same
                same = []
    return []


def _now() -> float:
    return asyncio.get_running_loop().time()
