"""Calls to the artifact store that wait for a yard that is down, and give up only on a definite answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import grpc
from trainyard_protos.v1 import artifacts_pb2
from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceStub

from trainyard.agent.link import Link, keep_talking
from trainyard.agent.plan import Plan

if TYPE_CHECKING:
    from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceAsyncStub

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0

# Answers that another try would not change.
_DEFINITE = frozenset(
    {
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class Refused(Exception):
    """The store gave a definite answer, and it is no.

    Attributes:
        code: the status.
    """

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(error.details() or error.code().name)
        self.code = error.code()


class Store:
    """The artifact store, for this attempt."""

    def __init__(self, plan: Plan, link: Link, delayed: Callable[[str], None] = lambda why: None) -> None:
        """
        Args:
            delayed: called with why the store takes nothing for now.
        """
        self._link = link
        self._delayed = delayed
        self.workspace = plan.workspace
        self.producer = artifacts_pb2.Producer(job_id=plan.job_id, attempt_id=plan.attempt_id, fence=plan.fence)

    async def call(self, action: Callable[[ArtifactServiceAsyncStub], Awaitable[T]]) -> T:
        """Does something with the store, again and again until there is an answer. Bound it by `asyncio.timeout`.

        Raises:
            Refused: the store says no.
            ArtifactError: what was sent or came back is not right.
        """
        answers: list[T] = []

        async def converse() -> bool:
            try:
                async with self._link.connect() as channel:
                    answers.append(await action(ArtifactServiceStub(channel)))
            except grpc.aio.AioRpcError as error:
                if error.code() in _DEFINITE:
                    raise Refused(error) from error
                raise
            return True

        await keep_talking(converse, self._delayed)
        return answers[0]

    async def record_use(self, version_id: str) -> None:
        """Notes that this job works with a version: lineage of what it makes.

        Raises:
            Refused: the store says no.
        """
        request = artifacts_pb2.RecordUseRequest(
            workspace=self.workspace, version_id=version_id, consumer=self.producer
        )
        await self.call(lambda stub: stub.RecordUse(request, timeout=CALL_TIMEOUT_S))
