"""The composition root: every service of a yard in one process, on one port.

The same services, composed by the same functions, run apart (`python -m trainyard_scheduler` and so on); here they
share an event loop, a gRPC server, SQLite files under the yard's home, and Celery's transport within one process. The
scheduler and the launcher serve first; metrics and artifacts follow while the first workers already start: calls to
them wait until they are up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, cast

import grpc
from servicekit import ports
from servicekit.auth import AttemptTokens, bearer_token
from servicekit.celery import celery_app
from servicekit.host import Host
from trainyard.channel import connect
from trainyard.endpoints import join_host_port
from trainyard.home import YardFile, process_start_time
from trainyard_launcher.compose import compose as compose_launcher
from trainyard_protos.v1 import yard_pb2_grpc
from trainyard_scheduler.compose import compose as compose_scheduler
from trainyard_scheduler.yard_servicer import YardFacts

from trainyard_embedded.late import LateServices, StartedServer
from trainyard_embedded.leftovers import Leftovers
from trainyard_embedded.published import Published
from trainyard_embedded.settings import YardSettings
from trainyard_embedded.yard_servicer import OwnYardServicer

if TYPE_CHECKING:
    from servicekit.service import Service
    from trainyard_launcher.backend import Backend

logger = logging.getLogger(__name__)

LATE = {
    "artifacts": ("trainyard.v1.ArtifactService", "trainyard.v1.ArtifactAdminService"),
    "metrics": ("trainyard.v1.MetricsService", "trainyard.v1.MetricsAdminService"),
}


class Yard:
    """All services of one machine's yard."""

    def __init__(self, settings: YardSettings, backend: Backend | None = None) -> None:
        self._settings = settings
        self._backend = backend
        self._services: list[Service] = []
        self._late_start: asyncio.Task[None] | None = None
        self._leftovers = Leftovers(settings.home, settings.tls_ca)
        self.endpoint = ""
        self.failure: Exception | None = None

    async def start(self) -> None:
        """Serves; metrics and artifacts come up behind it.

        Raises:
            ValueError: a setting is wrong. RuntimeError: a port is taken.
        """
        settings, home = self._settings, self._settings.home
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        token, tokens = bearer_token(home), AttemptTokens.load_or_create(home)
        self._late = LateServices(name for names in LATE.values() for name in names)
        self._host = Host(["scheduler", "launcher", *LATE], home, token, tokens, before=[self._late])
        port = self._listen()
        self.endpoint = join_host_port(self._client_host(), port)
        self._channel = connect(self.endpoint, token, settings.tls_ca)
        await self._start_core(token, tokens, await self._expose())
        (home / "port").write_text(str(port))
        self._published = Published(home, self._yard_file())
        self._late_start = asyncio.create_task(self._start_late(), name="late-services")

    async def whole(self) -> None:
        """Returns when every service is up, or `failure` says which is not."""
        if self._late_start is not None:
            await asyncio.shield(self._late_start)

    def _client_host(self) -> str:
        return "127.0.0.1" if self._settings.host in ("0.0.0.0", "::") else self._settings.host

    def _listen(self) -> int:
        settings = self._settings
        if settings.port:
            return self._host.listen(settings.host, settings.port, settings.tls)
        for port in self._ports():
            try:
                return self._host.listen(settings.host, port, settings.tls)
            except RuntimeError:
                continue  # somebody else has it
        return self._host.listen(settings.host, 0, settings.tls)

    def _ports(self) -> Iterator[int]:
        """The last one used, which agents know, then others that are likely to be free also the next time."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            yield int((self._settings.home / "port").read_text())
        yield from ports.candidates()

    async def _expose(self) -> str:
        """The URL of the metrics, when they are wanted."""
        settings = self._settings
        if not settings.metrics_port:
            return ""
        return await self._host.expose(settings.host, settings.metrics_port, settings.tls)

    async def _start_core(self, token: str, tokens: AttemptTokens, metrics_url: str) -> None:
        """The scheduler, then the server, then the launcher, which calls the scheduler through it."""
        settings, home, celery = self._settings, self._settings.home, celery_app()
        scheduler = compose_scheduler(
            home=home,
            database_url=f"sqlite:///{home}/scheduler.db",
            celery=celery,
            registry=self._host.registry,
            environ=settings.environ,
        )
        me = os.getpid()
        launcher = compose_launcher(
            home=home,
            celery=celery,
            endpoint=self.endpoint,
            token=token,
            tokens=tokens,
            environ=settings.environ,
            ca_file=settings.tls_ca,
            tied_to=(me, process_start_time(me) or 0) if settings.ephemeral else (0, 0),
            backend=self._backend,
            registry=self._host.registry,
            registered=self._host.health.condition("launcher", "registered"),
        )
        facts = YardFacts(home=str(home), metrics_url=metrics_url, ephemeral=settings.ephemeral)
        self.servicer = OwnYardServicer(facts, scheduler.cancel, scheduler.record_shutdown, self._channel)
        yard_pb2_grpc.add_YardServiceServicer_to_server(self.servicer, self._host.server)
        for service in (scheduler, launcher):
            service.register(self._host.server)
        await self._started(scheduler)
        await self._host.server.start()
        await self._started(launcher)

    async def _started(self, service: Service) -> None:
        await service.start()
        self._services.append(service)
        await self._host.health.set(service.name, True)

    async def _start_late(self) -> None:
        try:
            for service in await asyncio.get_running_loop().run_in_executor(None, self._make_late):
                service.register(cast(grpc.aio.Server, StartedServer(self._host.server)))
                await self._started(service)
                for name in LATE[service.name]:
                    self._late.open(name)
            await self._leftovers.deliver()
        except Exception as error:
            # A yard without one of its services would take jobs that cannot end well.
            logger.exception("a service did not start")
            self._late.fail()
            self.failure = error
            self.servicer.ended.set()

    def _make_late(self) -> list[Service]:
        from trainyard_artifacts.compose import compose as compose_artifacts
        from trainyard_metrics.compose import compose as compose_metrics

        home, environ, registry = self._settings.home, self._settings.environ, self._host.registry
        return [
            compose(home=home, database_url=f"sqlite:///{home}/{name}.db", registry=registry, environ=environ)
            for name, compose in (("artifacts", compose_artifacts), ("metrics", compose_metrics))
        ]

    def _yard_file(self) -> YardFile:
        installed = version("trainyard-embedded")
        settings = self._settings
        ca = settings.tls_ca if settings.tls else None
        return YardFile.of_this_process(self.endpoint, installed, ephemeral=settings.ephemeral, ca=ca)

    async def stop(self) -> None:
        """Ends the services. Work goes on and is found again by the next yard, unless this one was ephemeral."""
        if self._settings.ephemeral:
            await self.servicer.stop_jobs("the yard that was started for this job is going down")
        self._published.withdraw()
        if self._late_start is not None:
            await asyncio.gather(self._late_start, return_exceptions=True)
        await self._leftovers.stop()
        # The launcher first: it calls the others.
        for service in sorted(self._services, key=lambda each: each.name != "launcher"):
            await service.stop()
        await self._channel.close()
        await self._host.stop()
