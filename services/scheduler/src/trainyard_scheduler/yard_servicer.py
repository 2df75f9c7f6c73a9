"""YardService: what is behind this endpoint, and what becomes of a job whose client vanishes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import grpc
from servicekit.auth import require_user
from servicekit.errors import FailedPrecondition, ServiceError
from trainyard_protos.v1 import yard_pb2, yard_pb2_grpc

logger = logging.getLogger(__name__)

Cancel = Callable[[str, str, str], Awaitable[None]]
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class YardFacts:
    """What Info tells.

    Args:
        home: folder of the yard.
        metrics_url: where this process shows its metrics; "" when it does not.
        ephemeral: whether the yard was started for one command.
    """

    home: str
    metrics_url: str = ""
    ephemeral: bool = False


class YardServicer(yard_pb2_grpc.YardServiceServicer):
    """Serves a yard of services that run apart; the yard of one machine adds its lifetime to it.

    Args:
        facts: of this yard.
        cancel: cancels a job: workspace, id, message.
    """

    def __init__(self, facts: YardFacts, cancel: Cancel) -> None:
        self._facts = facts
        self._cancel = cancel
        self._farewells: set[asyncio.Task[None]] = set()

    async def Info(self, request: yard_pb2.InfoRequest, context: Context) -> yard_pb2.InfoResponse:
        facts = self._facts
        return yard_pb2.InfoResponse(
            version=version("trainyard-scheduler"),
            pid=os.getpid(),
            home=facts.home,
            ephemeral=facts.ephemeral,
            metrics_url=facts.metrics_url,
            services=["scheduler", "launcher", "metrics", "artifacts"],
        )

    async def Attach(
        self, request_iterator: AsyncIterator[yard_pb2.AttachRequest], context: Context
    ) -> AsyncGenerator[yard_pb2.AttachResponse, None]:
        require_user()
        wish = yard_pb2.AttachRequest()
        try:
            async for request in request_iterator:
                wish = request
                yield yard_pb2.AttachResponse()
        finally:
            # The stream's own task is being cancelled when its client vanished; what follows must not be.
            farewell = asyncio.create_task(self._on_detached(wish))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)

    async def _on_detached(self, wish: yard_pb2.AttachRequest) -> None:
        if wish.on_loss != yard_pb2.AttachRequest.ON_LOSS_CANCEL or not wish.job_id:
            return
        await self.cancel(wish.workspace, wish.job_id, "the client that ran this job went away")

    async def cancel(self, workspace: str, job_id: str, message: str) -> None:
        """Cancels a job, unless it is over or gone."""
        try:
            await self._cancel(workspace, job_id, message)
        except ServiceError as error:
            logger.info("cancel refused", extra={"job": job_id, "reason": error.reason})

    async def Shutdown(self, request: yard_pb2.ShutdownRequest, context: Context) -> yard_pb2.ShutdownResponse:
        require_user()
        raise FailedPrecondition(
            "the services of this yard run apart: no client ends them",
            reason="ServicesRunApart",
            hint="end them where they were started",
        )
