"""Compares what the scheduler believes this launcher has with what it has, and repairs both ways.

It mends what a lost message, a restart or a restored database left behind; in good days it finds nothing to do.
"""

from __future__ import annotations

import asyncio
import logging

import grpc
from trainyard_protos.v1 import scheduler_pb2, scheduler_pb2_grpc

from trainyard_launcher.scheduler import backoff
from trainyard_launcher.settings import Settings
from trainyard_launcher.supervisor import Supervisor

logger = logging.getLogger(__name__)

Assigned = scheduler_pb2.ListAssignedResponse.Assigned


class Reconciler:
    """The comparison, at start and from time to time."""

    def __init__(
        self,
        stub: scheduler_pb2_grpc.AttemptServiceAsyncStub,
        supervisor: Supervisor,
        launcher_id: str,
        settings: Settings,
    ) -> None:
        self._stub = stub
        self._supervisor = supervisor
        self._launcher_id = launcher_id
        self._settings = settings

    async def run(self) -> None:
        """For ever; soon again while the scheduler is away."""
        while True:
            for pause_s in backoff(most_s=self._settings.reconcile_s):
                try:
                    await self.once()
                    break
                except grpc.aio.AioRpcError as error:
                    logger.info("cannot reconcile", extra={"code": str(error.code()), "why": error.details()})
                await asyncio.sleep(pause_s)
            await asyncio.sleep(self._settings.reconcile_s)

    async def once(self) -> None:
        """One comparison.

        Raises:
            grpc.aio.AioRpcError: the scheduler did not answer.
        """
        # What begins while the scheduler answers is not in the answer, and not in this list either.
        ours = list(self._supervisor.attempts)
        request = scheduler_pb2.ListAssignedRequest(pool=self._settings.pool, launcher_id=self._launcher_id)
        answer = await self._stub.ListAssigned(request, timeout=self._settings.call_timeout_s)
        theirs = {(each.attempt_id, each.fence): each for each in answer.attempts}
        for attempt in ours:
            facts = attempt.facts
            if (facts.attempt_id, facts.fence) not in theirs and not attempt.over:
                logger.warning("attempt is not ours any more", extra={"attempt": facts.attempt_id, "job": facts.job_id})
                self._supervisor.disown(attempt)
        for assigned in theirs.values():
            await self._match(assigned)

    async def _match(self, assigned: Assigned) -> None:
        attempt = self._supervisor.attempts.get(assigned.attempt_id)
        begun = attempt is not None and not attempt.unstarted
        if assigned.state == "created":
            return  # its message is on the way
        if assigned.stopping:
            await self._supervisor.stop(assigned.attempt_id, assigned.fence)
        elif attempt is None and assigned.state in ("running", "finalizing", "publishing"):
            self._supervisor.lost(assigned)
        elif not begun:
            # Claimed, but this launcher died before it had started all of it.
            await self._supervisor.launch(assigned.attempt_id, assigned.fence)
