"""Tells the scheduler of which jobs there are folders here and runs in metrics.

A restored database, of the scheduler or of metrics, leaves things of jobs that the scheduler does not know. It decides
what becomes of them: after a grace time it has tombstones for them, as for any job that was removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from itertools import groupby

import grpc
from trainyard_protos.v1 import metrics_pb2, metrics_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

from trainyard_launcher.backend import Backend, Facts
from trainyard_launcher.scheduler import backoff, is_away
from trainyard_launcher.settings import Settings

logger = logging.getLogger(__name__)

_BATCH = 200
Holding = scheduler_pb2.ReportHoldingsRequest.Holding


class OrphanReporter:
    """The report, at start and from time to time."""

    def __init__(
        self,
        scheduler: scheduler_pb2_grpc.AttemptServiceAsyncStub,
        metrics: metrics_pb2_grpc.MetricsServiceAsyncStub,
        backend: Backend,
        settings: Settings,
    ) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._backend = backend
        self._settings = settings

    async def run(self) -> None:
        """For ever; soon again while the scheduler or metrics is away."""
        while True:
            for pause_s in backoff(most_s=self._settings.reconcile_s):
                try:
                    await self.once()
                    break
                except grpc.aio.AioRpcError as error:
                    logger.info("holdings not reported", extra={"code": str(error.code()), "why": error.details()})
                    if not is_away(error):
                        break  # an earlier version, which has no such method
                await asyncio.sleep(pause_s)
            await asyncio.sleep(self._settings.orphan_check_s)

    async def once(self) -> None:
        """One report.

        Raises:
            grpc.aio.AioRpcError: the scheduler or metrics did not answer.
        """
        folders = self._folders(await self._backend.held())
        for first in range(0, len(folders), _BATCH):
            await self._report(folders[first : first + _BATCH])
        async for runs in self._runs():
            await self._report(runs)

    async def _report(self, holdings: Sequence[Holding]) -> None:
        request = scheduler_pb2.ReportHoldingsRequest(holdings=holdings)
        answer = await self._scheduler.ReportHoldings(request, timeout=self._settings.call_timeout_s)
        if answer.unknown:
            logger.warning(
                "the scheduler does not know jobs that have folders or runs", extra={"count": answer.unknown}
            )

    def _folders(self, held: Sequence[Facts]) -> list[Holding]:
        """By job."""
        jobs = groupby(sorted(held, key=_job_of), key=_job_of)
        return [
            Holding(
                place=scheduler_pb2.Tombstone(
                    workspace=workspace,
                    job_id=job_id,
                    pool=self._settings.pool,
                    attempt_ids=[facts.attempt_id for facts in attempts],
                ),
                database_id=database_id,
            )
            for (workspace, job_id, database_id), attempts in jobs
            if database_id
        ]

    async def _runs(self) -> AsyncIterator[Sequence[Holding]]:
        request = metrics_pb2.ListJobsWithRunsRequest(page_size=_BATCH)
        while True:
            page = await self._metrics.ListJobsWithRuns(request, timeout=self._settings.call_timeout_s)
            if page.jobs:
                yield [
                    Holding(
                        place=scheduler_pb2.Tombstone(workspace=job.workspace, job_id=job.id),
                        database_id=job.database_id,
                    )
                    for job in page.jobs
                ]
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token


def _job_of(facts: Facts) -> tuple[str, str, str]:
    return facts.workspace, facts.job_id, facts.database_id
