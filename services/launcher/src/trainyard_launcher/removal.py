"""Removes what is left of jobs that the scheduler has removed: their attempts' folders here, their runs in metrics, and
their checkpoints in artifacts where a user removed the job.

The scheduler keeps a tombstone for each of them until this launcher confirms that it is done. A message only says that
there are new ones; they are also asked for at start and from time to time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import grpc
from trainyard_protos.v1 import (
    artifacts_pb2,
    artifacts_pb2_grpc,
    metrics_pb2,
    metrics_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)

from trainyard_launcher.backend import Backend
from trainyard_launcher.scheduler import backoff
from trainyard_launcher.settings import Settings
from trainyard_launcher.supervisor import Supervisor

logger = logging.getLogger(__name__)

_Tombstones = Sequence[scheduler_pb2.Tombstone]
_RUNS, _ARTIFACTS = "", "@artifacts"  # in place of a pool
_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Removal:
    """Acts on tombstones, for as long as there are any."""

    def __init__(
        self,
        scheduler: scheduler_pb2_grpc.AttemptServiceAsyncStub,
        metrics: metrics_pb2_grpc.MetricsServiceAsyncStub,
        artifacts: artifacts_pb2_grpc.ArtifactServiceAsyncStub,
        supervisor: Supervisor,
        backend: Backend,
        launcher_id: str,
        settings: Settings,
    ) -> None:
        self._launcher_id = launcher_id
        self._scheduler = scheduler
        self._metrics = metrics
        self._artifacts = artifacts
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
                done = [
                    *await self._remove_folders(tombstones),
                    *await self._remove_stored(tombstones, _RUNS, self._delete_runs),
                    *await self._remove_stored(tombstones, _ARTIFACTS, self._delete_artifacts),
                ]
                if done:
                    request = scheduler_pb2.ConfirmTombstonesRequest(tombstones=done)
                    await self._scheduler.ConfirmTombstones(request, timeout=self._settings.call_timeout_s)
                complete = complete and len(done) == len(tombstones)
        except grpc.aio.AioRpcError as error:
            logger.info("tombstones not read", extra={"code": str(error.code()), "why": error.details()})
            return False
        return complete

    async def _pages(self) -> AsyncIterator[_Tombstones]:
        request = scheduler_pb2.ListTombstonesRequest(pool=self._settings.pool, artifacts=True)
        while True:
            page = await self._scheduler.ListTombstones(request, timeout=self._settings.call_timeout_s)
            if page.tombstones:
                yield page.tombstones
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def _remove_folders(self, tombstones: _Tombstones) -> _Tombstones:
        """Those of which nothing is left here. An attempt that has not ended here keeps what it has until it has."""
        ours = [tombstone for tombstone in tombstones if tombstone.pool not in (_RUNS, _ARTIFACTS)]
        attempt_ids = [attempt_id for tombstone in ours for attempt_id in tombstone.attempt_ids]
        await self._supervisor.settle(attempt_ids)
        gone = frozenset(await self._backend.forget(attempt_ids))
        return [tombstone for tombstone in ours if gone.issuperset(tombstone.attempt_ids)]

    async def _remove_stored(
        self, tombstones: _Tombstones, place: str, delete: Callable[[scheduler_pb2.Tombstone], Awaitable[object]]
    ) -> _Tombstones:
        """Returns those of which a service has removed all. While it is away, this asks it for one tombstone only."""
        done = []
        for tombstone in tombstones:
            if tombstone.pool != place:
                continue
            try:
                await delete(tombstone)
            except grpc.aio.AioRpcError as error:
                logger.info(
                    "what a job stored is not removed",
                    extra={
                        "job": tombstone.job_id,
                        "place": place or "runs",
                        "code": str(error.code()),
                        "why": error.details(),
                    },
                )
                if error.code() in _UNREACHABLE:
                    break
                continue  # the service failed to remove this one, and may well remove the others
            done.append(tombstone)
        return done

    def _delete_runs(self, tombstone: scheduler_pb2.Tombstone) -> Awaitable[object]:
        request = metrics_pb2.DeleteJobRunsRequest(
            workspace=tombstone.workspace, job_id=tombstone.job_id, launcher_id=self._launcher_id
        )
        return self._metrics.DeleteJobRuns(request, timeout=self._settings.call_timeout_s)

    def _delete_artifacts(self, tombstone: scheduler_pb2.Tombstone) -> Awaitable[object]:
        request = artifacts_pb2.DeleteJobArtifactsRequest(
            workspace=tombstone.workspace,
            job_id=tombstone.job_id,
            launcher_id=self._launcher_id,
            kept_references=tombstone.kept_references,
        )
        return self._artifacts.DeleteJobArtifacts(request, timeout=self._settings.call_timeout_s)
