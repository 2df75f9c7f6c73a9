"""Removes what is left of jobs that the scheduler has removed: their attempts' folders here, their runs in metrics.

The scheduler keeps a tombstone for each of them until this launcher confirms that it is done. A message only says that
there are new ones; they are also asked for at start and from time to time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import grpc
from trainyard_protos.v1 import metrics_pb2, metrics_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

from trainyard_launcher.backend import Backend
from trainyard_launcher.scheduler import backoff
from trainyard_launcher.settings import Settings
from trainyard_launcher.supervisor import Supervisor

logger = logging.getLogger(__name__)

_Tombstones = Sequence[scheduler_pb2.Tombstone]
_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Removal:
    """Acts on tombstones, for as long as there are any."""

    def __init__(
        self,
        scheduler: scheduler_pb2_grpc.AttemptServiceAsyncStub,
        metrics: metrics_pb2_grpc.MetricsServiceAsyncStub,
        supervisor: Supervisor,
        backend: Backend,
        launcher_id: str,
        settings: Settings,
    ) -> None:
        self._launcher_id = launcher_id
        self._scheduler = scheduler
        self._metrics = metrics
        self._supervisor = supervisor
        self._backend = backend
        self._settings = settings
        self._news = asyncio.Event()

    def wake(self) -> None:
        """There are new tombstones."""
        self._news.set()

    async def run(self) -> None:
        """For ever: at once when woken, soon again while something could not be removed."""
        pauses = backoff(most_s=self._settings.reconcile_s)
        while True:
            self._news.clear()
            if await self._complete():
                pauses = backoff(most_s=self._settings.reconcile_s)
                await self._wait(self._settings.reconcile_s)
            else:
                await self._wait(next(pauses))

    async def _wait(self, at_most_s: float) -> None:
        try:
            async with asyncio.timeout(at_most_s):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _complete(self) -> bool:
        """Whether nothing is left to be removed."""
        complete = True
        try:
            async for tombstones in self._pages():
                done = [*await self._remove_folders(tombstones), *await self._remove_runs(tombstones)]
                if done:
                    request = scheduler_pb2.ConfirmTombstonesRequest(tombstones=done)
                    await self._scheduler.ConfirmTombstones(request, timeout=self._settings.call_timeout_s)
                complete = complete and len(done) == len(tombstones)
        except grpc.aio.AioRpcError as error:
            logger.info("tombstones not read", extra={"code": str(error.code()), "why": error.details()})
            return False
        return complete

    async def _pages(self) -> AsyncIterator[_Tombstones]:
        request = scheduler_pb2.ListTombstonesRequest(pool=self._settings.pool)
        while True:
            page = await self._scheduler.ListTombstones(request, timeout=self._settings.call_timeout_s)
            if page.tombstones:
                yield page.tombstones
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def _remove_folders(self, tombstones: _Tombstones) -> _Tombstones:
        """Those of which nothing is left here. An attempt that has not ended here keeps what it has until it has."""
        ours = [tombstone for tombstone in tombstones if tombstone.pool]
        attempt_ids = [attempt_id for tombstone in ours for attempt_id in tombstone.attempt_ids]
        await self._supervisor.settle(attempt_ids)
        gone = frozenset(await self._backend.forget(attempt_ids))
        return [tombstone for tombstone in ours if gone.issuperset(tombstone.attempt_ids)]

    async def _remove_runs(self, tombstones: _Tombstones) -> _Tombstones:
        """Returns those whose runs metrics has removed. While metrics is away, this asks it for one tombstone only."""
        done = []
        for tombstone in tombstones:
            if tombstone.pool:
                continue
            request = metrics_pb2.DeleteJobRunsRequest(
                workspace=tombstone.workspace, job_id=tombstone.job_id, launcher_id=self._launcher_id
            )
            try:
                await self._metrics.DeleteJobRuns(request, timeout=self._settings.call_timeout_s)
            except grpc.aio.AioRpcError as error:
                logger.info(
                    "runs not removed",
                    extra={"job": tombstone.job_id, "code": str(error.code()), "why": error.details()},
                )
                if error.code() in _UNREACHABLE:
                    break
                continue  # metrics failed to remove this one, and may well remove the others
            done.append(tombstone)
        return done
