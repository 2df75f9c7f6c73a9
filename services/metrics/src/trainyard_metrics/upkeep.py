"""What an operator does with the files of runs: count, check, repair, compact, copy, shorten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from servicekit.errors import DataLoss, NotFound, ServiceError

from trainyard_metrics.runlogs import RunLogs
from trainyard_metrics.settings import Settings
from trainyard_metrics.storage import usage
from trainyard_metrics.storage.backup import Copy, copies
from trainyard_metrics.storage.checking import check
from trainyard_metrics.storage.files import Damaged
from trainyard_metrics.storage.made import Made
from trainyard_metrics.storage.repair import Repaired
from trainyard_metrics.storage.usage import RunBytes, Usage, run_ids
from trainyard_metrics.storage.worker import CompactorFailed


@dataclass
class Maintained:
    """What maintenance did.

    Attributes:
        runs: that were compacted.
        failed: what did not work, in words.
    """

    runs: int = 0
    failed: list[str] = field(default_factory=list)


class Upkeep:
    """Works on runs one after the other, while they are written and read. Belongs to the event loop."""

    def __init__(self, logs: RunLogs, settings: Settings) -> None:
        self._logs = logs
        self._settings = settings

    async def usage(self) -> Usage:
        """What runs take on disk."""
        return await asyncio.to_thread(usage.usage, self._logs.root)

    async def bytes_of(self, run_ids: Sequence[str]) -> RunBytes:
        """What these runs take on disk."""
        return await asyncio.to_thread(usage.bytes_of, self._logs.root, run_ids)

    async def run_ids(self) -> list[str]:
        """The runs that have files."""
        return await asyncio.to_thread(run_ids, self._logs.root)

    async def verify(self, run_id: str) -> AsyncIterator[Damaged]:
        """Everything stored of a run that is not what was written, as it is found."""
        try:
            async with self._logs.use(run_id) as log:
                found = check(log.snapshot())
                while (damage := await asyncio.to_thread(_next, found)) is not None:
                    yield damage
        except DataLoss as loss:
            assert isinstance(loss.__cause__, Damaged), "that is how it is raised"
            yield loss.__cause__

    async def repair(self, run_id: str) -> list[Repaired]:
        """Saves what can be saved of a run. Its writers are sent away for as long as it takes.

        Raises:
            OSError: the disk is full, or failed; it can be done again.
        """
        return await self._logs.repair(run_id)

    async def maintain(self) -> Maintained:
        """Compacts all that is worth it, now."""
        done = Maintained()
        for run_id in await self.run_ids():
            segments, size = await asyncio.to_thread(usage.journal_bytes, self._logs.root / run_id)
            if segments < 2 and size < self._settings.min_compacted_bytes:
                continue
            try:
                await self._logs.compactions.compact(run_id, self._settings.min_compacted_bytes)
            except NotFound:
                continue
            except (ServiceError, OSError, CompactorFailed) as error:
                done.failed.append(f"run {run_id}: {error}")
            else:
                done.runs += 1
        return done

    @asynccontextmanager
    async def copies(self, run_id: str) -> AsyncIterator[list[Copy]]:
        """The files of a consistent copy of a run, to be read in threads while the context lasts.

        Raises:
            DataLoss: the run is damaged.
        """
        async with self._logs.use(run_id) as log:
            yield copies(log.snapshot(), log.state.manifest)

    async def drop_lines(self, run_id: str) -> None:
        """Removes the lines of a run; its points stay.

        Raises:
            ServiceError, OSError, CompactorFailed: the lines are still there.
        """
        await self._logs.compactions.compact(run_id, 1)
        async with self._logs.use(run_id) as log, log.compacting:
            lines = {file.name for file in log.state.manifest.of_kind("lines")}
            if lines:
                await log.switch(log.state.manifest.exchange(lines, ()), Made())


def _next(found: Iterator[Damaged]) -> Damaged | None:
    return next(found, None)
