"""The records of one run: numbered per writer, each stored once, acknowledged after the disk has them.

`stage` decides at once (skip, refuse, or take) and returns a future; a flusher writes everything that was staged
meanwhile as one frame with one fsync, and resolves the futures. So one fsync serves all batches that came while the
last one ran, and batches of a writer can follow each other without waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import TypeVar

from servicekit.errors import ServiceError, disk_failed
from trainyard_protos.v1.metrics_pb2 import AppendRequest

from trainyard_metrics.counters import Counters
from trainyard_metrics.domain import batches
from trainyard_metrics.settings import Settings
from trainyard_metrics.staging import Staging
from trainyard_metrics.storage.folder import RunFolder, Segment, State
from trainyard_metrics.storage.made import Made
from trainyard_metrics.storage.manifest import Manifest
from trainyard_metrics.storage.snapshot import Snapshot

logger = logging.getLogger(__name__)

T = TypeVar("T")

OnStored = Callable[[str, Sequence[AppendRequest]], None]
"""Told, in the event loop, of each frame that is durable, before it is acknowledged: the run's id and what is in it."""


class RunLog:
    """Appends to and indexes the records of one run. Belongs to the event loop; `executor` touches files."""

    def __init__(
        self,
        run_id: str,
        folder: RunFolder,
        state: State,
        *,
        settings: Settings,
        counters: Counters,
        executor: Executor,
        on_stored: OnStored,
        on_rolled: Callable[[str], None],
    ) -> None:
        self.run_id = run_id
        self.folder = folder
        self.state = state
        self.compacting = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._settings = settings
        self._counters = counters
        self._executor = executor
        self._on_stored = on_stored
        self._on_rolled = on_rolled
        self._staging = Staging(run_id, state, settings, counters)
        self._pending: list[tuple[AppendRequest, asyncio.Future[None]]] = []
        self._newest: asyncio.Future[None] | None = None
        self._flusher: asyncio.Task[None] | None = None
        self._finished: ServiceError | None = None

    def position(self, writer_id: str) -> int:
        """The first number of a writer that is not durable."""
        return self.state.positions.get(writer_id, 0)

    def snapshot(self) -> Snapshot:
        """What is durable now, to be read in a thread while `RunLogs.use` lasts."""
        return self.state.snapshot(self.run_id)

    def stage(self, request: AppendRequest) -> asyncio.Future[None]:
        """Takes a batch; the future resolves once it, and all before it, are durable.

        Raises:
            InvalidArgument: the batch contradicts itself.
            OutOfRange: records before it lack; `fields["expected"]` is the number to go on with.
            ResourceExhausted: too many writers.
            NotFound, Unavailable: the run was deleted, or the ingestor stops.
        """
        if self._finished is not None:
            raise self._finished
        if not self._staging.add(request):
            return self._settled()
        return self._enqueue(request)

    async def finish(self, why: ServiceError) -> None:
        """Waits for what is staged; whoever comes later gets `why`."""
        self._finished = why
        if self._flusher is not None:
            await self._flusher
        async with self._writing:
            pass  # what touches the files has ended

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be stored."""
        return not self._pending and (self._flusher is None or self._flusher.done())

    def _settled(self) -> asyncio.Future[None]:
        # A repeated batch may be one that is staged, but not durable yet.
        if self._newest is not None and not self._newest.done():
            return self._newest
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def _enqueue(self, request: AppendRequest) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        started = asyncio.get_running_loop().time()
        future.add_done_callback(lambda _: self._counters.durable_seconds.observe(future.get_loop().time() - started))
        self._pending.append((request, future))
        self._newest = future
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush(), name=f"flush {self.run_id}")
        return future

    async def _flush(self) -> None:
        while self._pending:
            async with self._writing:
                group = self._take_group()
                try:
                    await self._write([request for request, _ in group])
                except Exception as error:
                    self._fail(group, self._translate(error))
                    continue
            for _, future in group:
                _resolve(future)

    async def _write(self, requests: Sequence[AppendRequest]) -> None:
        segment = self.state.segments[-1]
        if segment.size >= self._settings.max_segment_bytes or segment.frames >= self._settings.max_segment_frames:
            segment = await self._roll()
            self._on_rolled(self.run_id)
        offset, size = await self.blocking(self.folder.append, requests)
        self._count(requests, size - segment.size)
        segment.size = size
        self.state.add(segment, offset, requests)
        self._on_stored(self.run_id, requests)

    async def roll(self, least_bytes: int) -> None:
        """Begins the next segment, when the one that grows has this size.

        Raises:
            NotFound, Unavailable: the run was deleted, or the ingestor stops.
            OSError: the old one goes on.
        """
        async with self._changing():
            newest = self.state.segments[-1]
            if newest.frames and newest.size >= least_bytes:
                await self._roll()

    async def _roll(self) -> Segment:
        segment = await self.blocking(self.folder.roll, self.state.segments[-1].number + 1)
        self.state.segments.append(segment)
        return segment

    async def switch(self, manifest: Manifest, made: Made) -> None:
        """Makes new column files count in the place of old files.

        Raises:
            NotFound, Unavailable: the run was deleted, or the ingestor stops.
            OSError: nothing has changed.
        """
        async with self._changing():
            await self.blocking(self.folder.switch, manifest, made)
            self.state.switched(manifest)

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        async with self._writing:
            if self._finished is not None:
                raise self._finished
            yield

    async def blocking(self, function: Callable[..., T], *arguments: object) -> T:
        """Runs something that touches files."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def _take_group(self) -> list[tuple[AppendRequest, asyncio.Future[None]]]:
        size = 0
        for taken, (request, _) in enumerate(self._pending):
            size += request.ByteSize()
            if taken and size > self._settings.max_group_bytes:
                break
        else:
            taken = len(self._pending)
        group, self._pending = self._pending[:taken], self._pending[taken:]
        return group

    def _fail(self, group: list[tuple[AppendRequest, asyncio.Future[None]]], error: ServiceError) -> None:
        # What was staged behind the failed group counts on it, so it fails as well; writers send it all again.
        failed, self._pending = [*group, *self._pending], []
        self._staging.forget()
        for _, future in failed:
            if not future.done():
                future.set_exception(error)

    def _translate(self, error: Exception) -> ServiceError:
        logger.error("records not written", exc_info=error)
        translated = disk_failed(error, "the metrics ingestor")
        self._counters.write_errors.labels(translated.reason).inc()
        return translated

    def _count(self, requests: Sequence[AppendRequest], size: int) -> None:
        self._counters.syncs.inc()
        self._counters.bytes.inc(size)
        for request in requests:
            self._counters.records.labels(request.WhichOneof("records")).inc(batches.count(request))
            self._counters.points.inc(batches.count_points(request.rows))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _retrieve(future: asyncio.Future[None]) -> None:
    # A stream that ended no longer looks at its futures; their errors were told to nobody on purpose.
    if not future.cancelled():
        future.exception()
