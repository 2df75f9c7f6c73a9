"""Records files that are open: made on first use, closed when others are used more recently."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from servicekit.budget import Budget
from servicekit.errors import DataLoss, NotFound, ServiceError, Unavailable
from trainyard_protos.v1.metrics_pb2 import AppendRequest

from trainyard_metrics.compacting import Compactions
from trainyard_metrics.counters import Counters
from trainyard_metrics.runlog import OnStored, RunLog
from trainyard_metrics.settings import Settings
from trainyard_metrics.storage.files import Damaged
from trainyard_metrics.storage.folder import RunFolder, State
from trainyard_metrics.storage.repair import Repaired, repair
from trainyard_metrics.storage.usage import journal_bytes, run_ids

logger = logging.getLogger(__name__)

_TRASH = ".trash-"


@dataclass
class _Entry:
    opening: asyncio.Task[RunLog]
    users: int = 0
    finished: bool = False  # the last user closes the file


class RunLogs:
    """One `RunLog` per run, below `root`/<run id>. Run ids are UUIDs: callers check that before.

    Args:
        read_only: files are read as they are; an unfinished write is left out, and not cut off.
    """

    def __init__(
        self,
        root: Path,
        settings: Settings,
        counters: Counters,
        on_stored: OnStored,
        threads: int = 4,
        *,
        read_only: bool = False,
    ) -> None:
        self._read_only = read_only
        self.root = root
        self._settings = settings
        self._counters = counters
        self._on_stored = on_stored
        self.waiting = Budget(settings.max_waiting_bytes, counters.waiting_bytes.set)
        counters.waiting_limit.set(settings.max_waiting_bytes)
        counters.open_runs.set_function(lambda: len(self._entries))
        self.compactions = Compactions(self.use, settings, counters)
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix="records")
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    @asynccontextmanager
    async def use(self, run_id: str) -> AsyncIterator[RunLog]:
        """The records of a run, open for as long as the context lasts.

        Raises:
            DataLoss: the file is damaged.
        """
        entry = self._entries.get(run_id)
        if entry is None:
            entry = self._entries[run_id] = _Entry(asyncio.create_task(self._open(run_id), name=f"open {run_id}"))
        self._entries.move_to_end(run_id)
        entry.users += 1
        try:
            yield await asyncio.shield(entry.opening)
        except Damaged as damage:
            raise self.lost(run_id, damage) from damage
        finally:
            entry.users -= 1
            if entry.opening.done() and entry.opening.exception() is not None and self._entries.get(run_id) is entry:
                del self._entries[run_id]
            if entry.finished and not entry.users:
                entry.opening.result().folder.close()
            await self._close_idle()

    async def discard(self, run_id: str) -> None:
        """Removes the records of a run. Whoever still appends gets NotFound."""
        entry = self._entries.pop(run_id, None)
        if entry is not None:
            deleted = NotFound(f"run {run_id} was deleted", reason="RunNotFound", hint="open a new run")
            await asyncio.gather(self._close(entry, deleted), return_exceptions=True)
        self.compactions.forget(run_id)
        await asyncio.get_running_loop().run_in_executor(self.executor, self._remove, run_id)

    async def repair(self, run_id: str) -> list[Repaired]:
        """Saves what can be saved of a run that is damaged. Who uses it is sent away, who comes meanwhile waits.

        Raises:
            OSError: the disk is full, or failed; it can be done again.
        """
        done: list[Repaired] = []
        opening = asyncio.create_task(self._open_repaired(run_id, self._entries.pop(run_id, None), done))
        entry = self._entries[run_id] = _Entry(opening, users=1)
        try:
            await asyncio.shield(opening)
        finally:
            entry.users -= 1
            if opening.done() and opening.exception() is not None and self._entries.get(run_id) is entry:
                del self._entries[run_id]
        return done

    async def _open_repaired(self, run_id: str, before: _Entry | None, done: list[Repaired]) -> RunLog:
        async with AsyncExitStack() as stack:
            if before is not None:
                with suppress(Damaged, OSError):
                    # A compaction would sweep away what repair makes.
                    await stack.enter_async_context((await before.opening).compacting)
                    await self._close(before, _stopping())
            done += await asyncio.get_running_loop().run_in_executor(self.executor, repair, self.root / run_id)
        return await self._open(run_id)

    async def close(self) -> None:
        """Writes what is staged, closes everything."""
        await self.compactions.close()
        entries = list(self._entries.values())
        self._entries.clear()
        await asyncio.gather(*(self._close(entry, _stopping()) for entry in entries), return_exceptions=True)
        await asyncio.to_thread(self.executor.shutdown)

    async def start(self) -> None:
        """Finishes removals that a crash cut short; looks for runs that are still to be compacted."""
        for run_id in await asyncio.to_thread(self._clean):
            self.compactions.written(run_id)

    def _clean(self) -> list[str]:
        for trash in self.root.glob(f"{_TRASH}*"):
            shutil.rmtree(trash)
        found = ((run_id, *journal_bytes(self.root / run_id)) for run_id in run_ids(self.root))
        return [run_id for run_id, files, size in found if files > 1 or size >= self._settings.min_compacted_bytes]

    def lost(self, run_id: str, damage: Damaged) -> DataLoss:
        """The error for a damaged file; counts and logs it."""
        self._counters.damaged.inc()
        logger.error("records damaged", extra={"run": run_id, "path": str(damage.path), "offset": damage.offset})
        return DataLoss(
            f"the records of run {run_id} are damaged at byte {damage.offset} of {damage.path.name}",
            reason="RecordsDamaged",
            hint="restore it from a backup, or run `yard admin verify --repair` to save what is left of it",
            fields={"run_id": run_id, "offset": str(damage.offset)},
        )

    async def _open(self, run_id: str) -> RunLog:
        folder, state = await asyncio.get_running_loop().run_in_executor(self.executor, self._recover, run_id)
        if len(state.segments) > 1 and not self._read_only:
            self.compactions.ready(run_id)
        return RunLog(
            run_id,
            folder,
            state,
            settings=self._settings,
            counters=self._counters,
            executor=self.executor,
            on_stored=self._stored,
            on_rolled=self.compactions.ready,
        )

    def _stored(self, run_id: str, requests: Sequence[AppendRequest]) -> None:
        self._on_stored(run_id, requests)
        self.compactions.written(run_id)

    def _recover(self, run_id: str) -> tuple[RunFolder, State]:
        folder = RunFolder(self.root / run_id, read_only=self._read_only)
        state = folder.open()
        if state.torn:
            self._counters.torn.inc()
            logger.warning("unfinished write cut off", extra={"run": run_id, "bytes": state.torn})
        return folder, state

    def _remove(self, run_id: str) -> None:
        folder = self.root / run_id
        trash = self.root / f"{_TRASH}{run_id}"
        if folder.exists():
            folder.replace(trash)
        shutil.rmtree(trash, ignore_errors=True)

    async def _close_idle(self) -> None:
        while len(self._entries) > self._settings.max_open_runs:
            idle = next((run_id for run_id, entry in self._entries.items() if _idle(entry)), None)
            if idle is None:
                return
            await self._close(self._entries.pop(idle), _stopping())

    async def _close(self, entry: _Entry, why: ServiceError) -> None:
        log = await entry.opening
        await log.finish(why)
        entry.finished = True
        if not entry.users:
            log.folder.close()


def _stopping() -> Unavailable:
    return Unavailable(
        "the metrics ingestor stops", reason="Stopping", hint="connect again and go on from the position"
    )


def _idle(entry: _Entry) -> bool:
    return entry.users == 0 and entry.opening.done() and entry.opening.result().idle
