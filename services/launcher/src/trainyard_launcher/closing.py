"""The end of an attempt at metrics and artifacts: its token stores nothing more, and what it left is delivered with
another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import grpc
from servicekit.auth import AttemptTokens
from trainyard_protos.v1 import artifacts_pb2_grpc, metrics_pb2, metrics_pb2_grpc

from trainyard_launcher.backend import Facts
from trainyard_launcher.scheduler import backoff, is_away

logger = logging.getLogger(__name__)

_DELIVERY_S = 300.0  # longer than one try
_MOST_S = 10.0  # between two tries


class Closing:
    """Closes attempts that are over.

    Args:
        channel: to metrics and artifacts.
        tokens: mints the tokens for deliveries.
    """

    def __init__(self, channel: grpc.aio.Channel, tokens: AttemptTokens, call_timeout_s: float) -> None:
        self._metrics = metrics_pb2_grpc.MetricsServiceStub(channel)
        self._artifacts = artifacts_pb2_grpc.ArtifactServiceStub(channel)
        self._tokens = tokens
        self._call_timeout_s = call_timeout_s

    async def close(self, facts: Facts, undelivered: Sequence[str]) -> None:
        """Closes an attempt in every service, however long one of them is away.

        Args:
            undelivered: the writers whose records metrics is still to be given.
        """
        request = metrics_pb2.CloseAttemptRequest(
            workspace=facts.workspace, job_id=facts.job_id, attempt_id=facts.attempt_id, fence=facts.fence
        )
        await asyncio.gather(
            _until_done(lambda: self.change(facts, undelivered), "metrics", facts),
            _until_done(
                lambda: self._artifacts.CloseAttempt(request, timeout=self._call_timeout_s), "artifacts", facts
            ),
        )

    async def publish(self, facts: Facts) -> None:
        """Makes the outputs of an attempt that succeeded the newest versions, however long artifacts is away."""
        request = metrics_pb2.CloseAttemptRequest(
            workspace=facts.workspace,
            job_id=facts.job_id,
            attempt_id=facts.attempt_id,
            fence=facts.fence,
            succeeded=True,
        )
        await _until_done(
            lambda: self._artifacts.CloseAttempt(request, timeout=self._call_timeout_s), "artifacts", facts
        )

    async def change(self, facts: Facts, undelivered: Sequence[str] = ()) -> None:
        """Tells metrics anew which writers' records of an attempt are undelivered; those of before no longer are.

        Raises:
            grpc.aio.AioRpcError: metrics did not do it.
        """
        request = metrics_pb2.CloseAttemptRequest(
            workspace=facts.workspace,
            job_id=facts.job_id,
            attempt_id=facts.attempt_id,
            fence=facts.fence,
            undelivered_writers=undelivered,
        )
        await self._metrics.CloseAttempt(request, timeout=self._call_timeout_s)

    async def delivery_token(self, facts: Facts, undelivered: Sequence[str]) -> str:
        """Says the same to metrics, and makes the token with which it takes those records.

        Raises:
            grpc.aio.AioRpcError: metrics did not do it.
        """
        await self.change(facts, undelivered)
        token, _ = self._tokens.mint(
            facts.workspace,
            facts.job_id,
            facts.attempt_id,
            facts.fence,
            _DELIVERY_S,
            delivery=True,
            database_id=facts.database_id,
        )
        return token


async def _until_done(call: Callable[[], Awaitable[object]], service: str, facts: Facts) -> None:
    """Until the service has done it. What it refuses is refused again: that is logged, and given up."""
    for pause_s in backoff(most_s=_MOST_S):
        try:
            await call()
            return
        except grpc.aio.AioRpcError as error:
            about = {"attempt": facts.attempt_id, "service": service, "why": error.details()}
            if not is_away(error):
                logger.error("attempt not closed", extra=about)
                return
            logger.info("attempt not closed yet", extra=about)
        await asyncio.sleep(pause_s)
