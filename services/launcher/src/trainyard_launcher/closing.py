"""The end of an attempt at metrics: its token stores nothing more, and what it left is delivered with another."""

from __future__ import annotations

from collections.abc import Sequence

from servicekit.auth import AttemptTokens
from trainyard_protos.v1 import metrics_pb2, metrics_pb2_grpc

from trainyard_launcher.backend import Facts

_DELIVERY_S = 300.0  # longer than one try


class Closing:
    """Closes attempts that are over.

    Args:
        tokens: mints the tokens for deliveries.
    """

    def __init__(
        self, stub: metrics_pb2_grpc.MetricsServiceAsyncStub, tokens: AttemptTokens, call_timeout_s: float
    ) -> None:
        self._stub = stub
        self._tokens = tokens
        self._call_timeout_s = call_timeout_s

    async def close(self, facts: Facts, undelivered: Sequence[str] = ()) -> None:
        """Closes an attempt.

        Args:
            undelivered: the writers whose records are still to be delivered; those of an earlier call no longer are.

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
        await self._stub.CloseAttempt(request, timeout=self._call_timeout_s)

    async def delivery_token(self, facts: Facts, undelivered: Sequence[str]) -> str:
        """Closes an attempt, and makes the token with which metrics takes what it left.

        Raises:
            grpc.aio.AioRpcError: metrics did not do it.
        """
        await self.close(facts, undelivered)
        token, _ = self._tokens.mint(
            facts.workspace, facts.job_id, facts.attempt_id, facts.fence, _DELIVERY_S, delivery=True
        )
        return token
