"""What every process of the yard has, whichever services run in it: a gRPC server, health, metrics, an HTTP port."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from trainyard.endpoints import join_host_port

from servicekit import descriptors
from servicekit import server as servers
from servicekit.auth import AttemptVerifier, Authenticator
from servicekit.exposition import Exposition
from servicekit.health import Health
from servicekit.refusals import Refusals
from servicekit.server import Tls
from servicekit.vitals import CertificateGauge, watch_disk

_GRACE_S = 0.5


class Host:
    """Services register with `server`, show themselves in `registry` and are ready when `health` says so.

    Args:
        services: their names.
        home: where they keep their files.
        token: the users' bearer token.
        tokens: verifies attempts.
        before: interceptors that run ahead of authentication.
        metrics_token: opens `/metrics` and nothing else; "" for none. The users' token opens it as well.
        operator_token: of the operator; "" when it has none of its own.
    """

    def __init__(
        self,
        services: list[str],
        home: Path,
        token: str,
        tokens: AttemptVerifier,
        before: Sequence[grpc.aio.ServerInterceptor] = (),
        metrics_token: str = "",
        operator_token: str = "",
    ) -> None:
        descriptors.raise_limit()
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        watch_disk(self.registry, home)
        self._certificates = CertificateGauge(self.registry)
        self._refusals = Refusals(self.registry)
        authenticator = Authenticator(token, tokens, operator_token)
        self.server = servers.build(authenticator, self.registry, before, refusals=self._refusals)
        self.health = Health(services, self.registry)
        self.health.register(self.server)
        self._exposition = Exposition(
            self.registry, self.health, [each for each in (token, metrics_token) if each], self._refusals
        )

    def listen(self, host: str, port: int, tls: Tls | None = None) -> int:
        """Binds the gRPC server; see `servicekit.server.listen`."""
        bound = servers.listen(self.server, host, port, tls)
        if tls is not None:
            self._certificates.show("grpc", tls.certificate)
        return bound

    async def expose(self, host: str, port: int, tls: Tls | None = None) -> str:
        """Serves metrics and health over HTTP; returns the URL of the metrics."""
        bound = await self._exposition.start(host, port, tls)
        if tls is not None:
            self._certificates.show("http", tls.certificate)
        return f"{'https' if tls else 'http'}://{join_host_port(host, bound)}/metrics"

    async def stop(self) -> None:
        """Ends both servers; the services have ended before."""
        await self.server.stop(_GRACE_S)
        await self._exposition.stop()
        self._refusals.close()
