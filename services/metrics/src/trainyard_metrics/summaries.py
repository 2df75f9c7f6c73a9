"""Summaries of runs: in memory while they are written, in the database about a second later.

A run is marked dirty in the database before its first unsaved change and unmarked when it has been saved and is
quiet, so that after a crash the marked runs are made anew from their points: nothing is stale, nothing counts twice.

An attempt's summary is the one of its job's visible series up to it. So it has to be made anew when the attempt opens
after others, when its rewind becomes known, and when an earlier attempt still delivers points.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from servicekit.errors import ServiceError
from servicekit.store import Store
from trainyard_protos.v1.metrics_pb2 import AppendRequest

from trainyard_metrics import runs, summary_rows
from trainyard_metrics.domain.summary import Summary
from trainyard_metrics.runs import Facts
from trainyard_metrics.settings import Settings
from trainyard_metrics.tracked import Tracked

logger = logging.getLogger(__name__)

_SAVED_AT_ONCE = 256
_COST = 20
"""After a save, this many times its duration passes before the next."""

Job = tuple[str, str]
Remake = Callable[[Facts, Callable[[], None]], Awaitable[Summary]]
"""Makes the summary of a run from points; calls back in the event loop at the moment up to which it has records."""


class Summaries:
    """The summaries of all runs. Belongs to the event loop."""

    def __init__(self, store: Store, settings: Settings, remake: Remake) -> None:
        self._store = store
        self._settings = settings
        self._remake = remake
        self._loading: dict[str, asyncio.Task[Tracked]] = {}
        self._tracked: dict[str, Tracked] = {}
        self._overtaken: dict[Job, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._saving = asyncio.Lock()
        self._watchers: list[set[str]] = []
        self._recovered = asyncio.Event()

    async def start(self) -> None:
        """Begins to make the summaries of marked runs anew, and to save. A read-only store has them as they were saved:
        one that a crash left marked is made anew in memory when it is asked for."""
        if self._store.read_only:
            self._recovered.set()
            return
        dirty = await self._store.read(summary_rows.dirty)
        self._spawn(self._recover(dirty), "recover summaries")
        self._spawn(self._keep(), "save summaries")

    async def cease(self) -> None:
        """Ends all background work; what was not made anew stays marked."""
        tasks = [*self._tasks, *self._loading.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self) -> None:
        """Saves everything; to be called after `cease`, when nothing is appended any more."""
        try:
            await self._save()
            await self._unmark([tracked for tracked in self._tracked.values() if self._is_complete(tracked)])
        except ServiceError as error:
            logger.error("summaries not saved; they are made anew at the next start", extra={"reason": error.reason})

    @asynccontextmanager
    async def writing(self, run_id: str) -> AsyncIterator[None]:
        """To be entered before the first record of a stream is stored.

        Raises:
            NotFound: there is no such run.
        """
        tracked = await self._find(run_id)
        tracked.writers += 1
        try:
            await self._mark(tracked)
            yield
        finally:
            tracked.writers -= 1

    def is_written(self, run_id: str) -> bool:
        """Whether a stream that may write to a run is open."""
        tracked = self._tracked.get(run_id)
        return tracked is not None and tracked.writers > 0

    @contextmanager
    def written(self) -> Iterator[set[str]]:
        """The runs that got records while the context lasts."""
        runs_written: set[str] = set()
        self._watchers.append(runs_written)
        try:
            yield runs_written
        finally:
            self._watchers.remove(runs_written)

    def on_stored(self, run_id: str, requests: Sequence[AppendRequest]) -> None:
        """Takes note of a durable frame."""
        for runs_written in self._watchers:
            runs_written.add(run_id)
        tracked = self._tracked.get(run_id)
        if tracked is None:
            return
        tracked.add(requests)
        if tracked.superseded:
            self._overtake(tracked.run)
        self._changed.set()

    async def opened(self, run: Facts, *, stitch: bool) -> None:
        """Takes note of a run that was opened.

        Args:
            stitch: whether what it makes visible of earlier attempts is new.
        """
        if not stitch:
            return
        for tracked in self._tracked.values():
            if run.job_id and tracked.run.job == run.job and tracked.run.fence < run.fence:
                tracked.superseded = True
        self._begin(await self._find(run.id))

    async def make_anew(self, run_id: str) -> None:
        """Makes the summaries of a run and of the attempts after it anew, because its records are no longer the same.

        Raises:
            NotFound: there is no such run.
            DataLoss: records are damaged.
        """
        tracked = await self._find(run_id)
        if tracked.superseded:
            self._overtake(tracked.run)
        self._begin(tracked)
        await self.track(run_id)

    async def track(self, run_id: str) -> Tracked:
        """The summary of a run, kept in memory for a while.

        Raises:
            NotFound: there is no such run.
            DataLoss: it has to be made anew, and records are damaged.
        """
        tracked = await self._find(run_id)
        if tracked.failed and tracked.making is None:
            self._begin(tracked)
        while tracked.making is not None:
            await asyncio.shield(tracked.making)
        return tracked

    async def of_job(self, run: Facts) -> Tracked:
        """The summary of a job's newest attempt, with everything that earlier ones still delivered.

        Raises:
            DataLoss: see `track`.
        """
        await self._restitch(run.job)
        return await self.track(run.id)

    async def settle(self) -> None:
        """Returns once the database has the summaries of everything that was acknowledged before."""
        making = [tracked.making for tracked in self._tracked.values() if tracked.making is not None]
        await asyncio.gather(self._recovered.wait(), *map(asyncio.shield, making), return_exceptions=True)
        for job in list(self._overtaken):
            await self._restitch(job)
        await self._save()

    def recent(self, seconds: float) -> list[Tracked]:
        """Summaries that changed within some time, the newest first. For any thread."""
        since = time.monotonic() - seconds
        found = [
            tracked for tracked in list(self._tracked.values()) if tracked.touched >= since and len(tracked.summary)
        ]
        return sorted(found, key=lambda tracked: -tracked.touched)

    def forget(self, run_ids: Iterable[str]) -> None:
        """Drops removed runs."""
        for run_id in run_ids:
            self._tracked.pop(run_id, None)

    async def _find(self, run_id: str) -> Tracked:
        found = self._tracked.get(run_id)
        if found is not None:
            return found
        task = self._loading.get(run_id)
        if task is None:
            task = self._loading[run_id] = asyncio.create_task(self._load(run_id), name=f"load summary of {run_id}")
            task.add_done_callback(lambda _: self._loading.pop(run_id))
        return await asyncio.shield(task)

    async def _load(self, run_id: str) -> Tracked:
        row, packed = await self._store.read(
            lambda session: (runs.find(session, run_id), summary_rows.load(session, run_id))
        )
        summary = Summary.unpack(packed) if packed else Summary()
        tracked = Tracked(runs.facts(row), summary, marked=row.dirty, saved=summary.revision, superseded=row.superseded)
        self._tracked[run_id] = tracked
        if row.dirty:
            self._begin(tracked)
        return tracked

    def _begin(self, tracked: Tracked) -> None:
        tracked.making = self._spawn(self._anew(tracked), f"summary of {tracked.run.id}")

    async def _anew(self, tracked: Tracked) -> None:
        def begin() -> None:
            tracked.backlog = []

        async with tracked.lock:
            tracked.failed = True  # until it is made
            try:
                await self._mark(tracked)
                tracked.summary = await self._remake(tracked.run, begin)
                tracked.failed, tracked.saved = False, -1
            except ServiceError as error:
                logger.error("summary not made", extra={"run": tracked.run.id, "reason": error.reason})
                raise
            finally:
                backlog, tracked.backlog = tracked.backlog, None
                tracked.add(backlog or ())
                if tracked.making is asyncio.current_task():
                    tracked.making = None
            self._changed.set()

    async def _recover(self, run_ids: Sequence[str]) -> None:
        try:
            await self._store.write(lambda session: summary_rows.mark(session, run_ids, dirty=True))
            for run_id in run_ids:
                with suppress(ServiceError):  # it was logged
                    await self.track(run_id)
        finally:
            self._recovered.set()

    def _overtake(self, run: Facts) -> None:
        """The summaries of later attempts no longer hold."""
        self._overtaken[run.job] = min(run.fence, self._overtaken.get(run.job, run.fence))

    async def _restitch(self, job: Job) -> None:
        fence = self._overtaken.pop(job, None)
        if fence is None:
            return
        try:
            for run_id in await self._store.read(lambda session: summary_rows.later(session, *job, fence)):
                self._begin(await self._find(run_id))
                await self.track(run_id)
        except BaseException:
            self._overtaken[job] = min(fence, self._overtaken.get(job, fence))
            raise

    async def _mark(self, tracked: Tracked) -> None:
        if not tracked.marked and not self._store.read_only:
            await self._store.write(lambda session: summary_rows.mark(session, [tracked.run.id], dirty=True))
            tracked.marked = True

    async def _keep(self) -> None:
        while True:
            await self._wait_for_changes()
            started = time.monotonic()
            try:
                await self._save()
                await self._tidy()
            except ServiceError as error:
                logger.warning("summaries not saved, trying again", extra={"reason": error.reason})
                self._changed.set()
            await asyncio.sleep(max(self._settings.summary_interval_s, _COST * (time.monotonic() - started)))

    async def _wait_for_changes(self) -> None:
        with suppress(TimeoutError):
            # Not wait_for: in Python 3.11 it forgets that its task was cancelled when the change comes at that moment.
            async with asyncio.timeout(self._settings.summary_quiet_s if self._tracked else None):
                await self._changed.wait()
        self._changed.clear()

    async def _save(self) -> None:
        if self._store.read_only:
            return
        async with self._saving:
            changed = [tracked for tracked in self._tracked.values() if tracked.unsaved]
            for start in range(0, len(changed), _SAVED_AT_ONCE):
                await self._save_some(changed[start : start + _SAVED_AT_ONCE])

    async def _save_some(self, changed: Sequence[Tracked]) -> None:
        rows = [tracked.row() for tracked in changed]
        written = [(tracked, tracked.summary, tracked.summary.revision) for tracked in changed]
        await self._store.write(lambda session: summary_rows.save(session, rows))
        for tracked, summary, revision in written:
            if tracked.summary is summary:  # else it was made anew meanwhile
                tracked.saved = revision

    async def _tidy(self) -> None:
        """Unmarks what is quiet, and drops what has been quiet for long."""
        quiet = self._quiet(self._settings.summary_quiet_s)
        for job in {tracked.run.job for tracked in quiet} & self._overtaken.keys():
            await self._restitch(job)
        await self._unmark([tracked for tracked in quiet if tracked.marked and self._is_complete(tracked)])
        for tracked in self._quiet(self._settings.summary_kept_s):
            if not tracked.marked and self._is_complete(tracked):
                del self._tracked[tracked.run.id]

    def _quiet(self, seconds: float) -> list[Tracked]:
        since = time.monotonic() - seconds
        return [tracked for tracked in self._tracked.values() if not tracked.writers and tracked.touched <= since]

    async def _unmark(self, complete: Sequence[Tracked]) -> None:
        if not complete or self._store.read_only:
            return
        for tracked in complete:
            tracked.marked = False  # whoever writes from now on marks it again, behind this
        run_ids = [tracked.run.id for tracked in complete]
        await self._store.write(lambda session: summary_rows.mark(session, run_ids, dirty=False))

    def _is_complete(self, tracked: Tracked) -> bool:
        return tracked.settled and tracked.run.job not in self._overtaken

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, ServiceError):
            logger.error("%s failed", task.get_name(), exc_info=error)
