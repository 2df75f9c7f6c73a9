"""What a composition root needs of a service."""

from __future__ import annotations

from typing import Protocol

import grpc


class Service(Protocol):
    """One service of the yard. `start` may open stores and begin background work."""

    name: str

    def register(self, server: grpc.aio.Server) -> None: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...
