"""Which services of a process serve: for gRPC's health service, for `/readyz`, and as a metric."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from prometheus_client import CollectorRegistry, Gauge

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """The state of each service, under its short name and, when all serve, under "".

    Args:
        services: names; none serves yet.
    """

    def __init__(self, services: list[str], registry: CollectorRegistry) -> None:
        self._servicer = health_aio.HealthServicer()
        self._gauge = Gauge("trainyard_ready", "Whether the service serves", ["service"], registry=registry)
        self._ready = dict.fromkeys(services, False)
        self._unmet: dict[str, set[str]] = {name: set() for name in services}
        for name in services:
            self._gauge.labels(name).set(0)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds gRPC's health service to a server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def missing(self) -> list[str]:
        """The services that do not serve."""
        return [name for name in self._ready if not self._serves(name)]

    def _serves(self, service: str) -> bool:
        return self._ready[service] and not self._unmet[service]

    def condition(self, service: str, name: str) -> Callable[[bool], Awaitable[None]]:
        """Something beside its start without which a service does not serve. It does not hold until the function that
        this returns is called with True."""
        self._unmet[service].add(name)

        async def change(holds: bool) -> None:
            (self._unmet[service].discard if holds else self._unmet[service].add)(name)
            await self._tell(service)

        return change

    async def set(self, service: str, ready: bool) -> None:
        """The service has started, or ends."""
        self._ready[service] = ready
        await self._tell(service)

    async def _tell(self, service: str) -> None:
        serves = self._serves(service)
        self._gauge.labels(service).set(serves)
        await self._servicer.set(service, _SERVING if serves else _NOT_SERVING)
        await self._servicer.set("", _NOT_SERVING if self.missing() else _SERVING)

    async def leave(self) -> None:
        """None serves any more; watchers are told."""
        for service in self._ready:
            await self.set(service, False)
        await self._servicer.enter_graceful_shutdown()
