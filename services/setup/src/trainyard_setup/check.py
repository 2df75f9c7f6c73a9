"""Whether every service of the yard answers a user: `helm test`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
from trainyard.channel import connect
from trainyard_protos.v1 import (
    artifacts_pb2,
    artifacts_pb2_grpc,
    launcher_pb2,
    launcher_pb2_grpc,
    metrics_pb2,
    metrics_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)

_CALL_TIMEOUT_S = 60
_NO_JOB = "00000000-0000-7000-8000-000000000000"


class Unwell(Exception):
    """A service does not answer; the message says which and what it said."""


async def check(environ: Mapping[str, str]) -> list[str]:
    """The services that answered, asked as the `yard` command would be.

    Args:
        environ: with TRAINYARD_ENDPOINT, TRAINYARD_TOKEN and TRAINYARD_CA_FILE.

    Raises:
        Unwell: one does not answer.
    """
    ca_file = environ.get("TRAINYARD_CA_FILE")
    async with connect(
        environ["TRAINYARD_ENDPOINT"], environ["TRAINYARD_TOKEN"], Path(ca_file) if ca_file else None
    ) as channel:
        for name, ask in _questions(channel).items():
            await _answered(name, ask)
    return list(_questions(channel))


def _questions(channel: grpc.aio.Channel) -> dict[str, Callable[[], Awaitable[Any]]]:
    options: dict[str, Any] = {"timeout": _CALL_TIMEOUT_S, "wait_for_ready": True}
    return {
        "scheduler": lambda: scheduler_pb2_grpc.SchedulerServiceStub(channel).ListPools(
            scheduler_pb2.ListPoolsRequest(), **options
        ),
        "launcher": lambda: launcher_pb2_grpc.LauncherServiceStub(channel).Describe(
            launcher_pb2.DescribeRequest(job_id=_NO_JOB), **options
        ),
        "metrics": lambda: metrics_pb2_grpc.MetricsServiceStub(channel).ListRuns(
            metrics_pb2.ListRunsRequest(page_size=1), **options
        ),
        "artifacts": lambda: artifacts_pb2_grpc.ArtifactServiceStub(channel).ListArtifacts(
            artifacts_pb2.ListArtifactsRequest(), **options
        ),
    }


async def _answered(name: str, ask: Callable[[], Awaitable[Any]]) -> None:
    try:
        await ask()
    except grpc.aio.AioRpcError as error:
        # The launcher runs no such job, which is an answer.
        if name != "launcher" or error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
            raise Unwell(f"{name} does not answer: {error.code().name}: {error.details()}") from error


def main(environ: Mapping[str, str]) -> str:
    """What to print when all is well; raises Unwell."""
    return f"{', '.join(asyncio.run(check(environ)))} answer"
