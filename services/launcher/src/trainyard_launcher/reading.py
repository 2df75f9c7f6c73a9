"""The launcher of a yard that only reads: it measures the folders of this machine's attempts, and runs nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
from servicekit.auth import require_user
from trainyard_protos.v1 import launcher_pb2_grpc
from trainyard_protos.v1.admin_pb2 import GetUsageRequest, GetUsageResponse

from trainyard_launcher.backends.process.usage import usage


class ReadingLauncher(launcher_pb2_grpc.LauncherServiceServicer):
    """Serves `GetUsage` alone.

    Args:
        home: the yard's folder.
    """

    name = "launcher"

    def __init__(self, home: Path) -> None:
        self._home = home

    def register(self, server: grpc.aio.Server) -> None:
        """Adds LauncherService to a server."""
        launcher_pb2_grpc.add_LauncherServiceServicer_to_server(self, server)

    async def start(self) -> None:
        """There is nothing to start."""

    async def stop(self) -> None:
        """There is nothing to stop."""

    async def GetUsage(self, request: GetUsageRequest, context: grpc.aio.ServicerContext[Any, Any]) -> GetUsageResponse:
        """What attempts take on disk."""
        require_user()
        return await asyncio.to_thread(usage, self._home, frozenset(request.job_ids))
