"""Services that come up after the server does: calls to them wait, up to their own deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc


class LateServices(grpc.aio.ServerInterceptor):
    """Holds calls to the named services until each is opened.

    Args:
        names: full names of the services, as in the method path.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._ready: dict[str, asyncio.Future[None]] = {
            name: asyncio.get_running_loop().create_future() for name in names
        }

    def open(self, name: str) -> None:
        """From now on, calls to this service go through."""
        self._ready.pop(name).set_result(None)

    def fail(self) -> None:
        """The services that are not up will not come: their calls find no such method."""
        while self._ready:
            self._ready.popitem()[1].set_result(None)

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        waiting = self._ready.get(str(details.method).split("/")[1])
        if waiting is not None:
            await asyncio.shield(waiting)
        return await continuation(details)


class StartedServer:
    """What a service registers with when the server has started: such a server takes generic handlers only."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """A shortcut to the same handlers, for servers that have not started."""
