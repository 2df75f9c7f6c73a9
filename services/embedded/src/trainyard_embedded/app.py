"""The composition root: every service of a yard in one process, on one port.

The same service classes run apart on a cluster; here they share an event loop, a gRPC server, SQLite files under the
yard's home, and Celery's in-memory transport. The scheduler and the launcher serve first; metrics and artifacts follow
while the first workers already start: calls to them wait until they are up.
"""

from __future__ import annotations

import asyncio
import logging
import os
from importlib.metadata import version
from typing import TYPE_CHECKING

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from prometheus_client import CollectorRegistry
from servicekit import server as servers
from servicekit.auth import AttemptTokens, Authenticator, bearer_token
from servicekit.celery import celery_app
from trainyard.channel import connect
from trainyard.home import YardFile, boot_id, process_start_time, write_endpoint
from trainyard_protos.v1 import yard_pb2_grpc

from trainyard_embedded.late import LateServices
from trainyard_embedded.leftovers import Leftovers
from trainyard_embedded.settings import YardSettings
from trainyard_embedded.yard_servicer import YardServicer

if TYPE_CHECKING:
    from servicekit.service import Service
    from trainyard_launcher.backend import Backend

logger = logging.getLogger(__name__)

_METRICS = "trainyard.v1.MetricsService"
_ARTIFACTS = "trainyard.v1.ArtifactService"


class Yard:
    """All services of one machine's yard."""

    def __init__(self, settings: YardSettings, backend: Backend | None = None) -> None:
        self._settings = settings
        self._backend = backend
        self._services: list[Service] = []
        self._late_start: asyncio.Task[None] | None = None
        self._leftovers = Leftovers(settings.home, settings.tls_ca)
        self.registry = CollectorRegistry()
        self.endpoint = ""
        self.token = ""
        self.failure: Exception | None = None

    async def start(self) -> None:
        """Serves; metrics and artifacts come up behind it.

        Raises:
            ValueError: a setting is wrong. RuntimeError: the port is taken.
        """
        home = self._settings.home
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.token = bearer_token(home)
        self._tokens = AttemptTokens.load_or_create(home)
        self._late = LateServices([_METRICS, _ARTIFACTS])
        self._server = servers.build(Authenticator(self.token, self._tokens), self.registry, before=[self._late])
        port = self._listen()
        self.endpoint = f"{self._client_host()}:{port}"
        self.channel = connect(self.endpoint, self.token, self._settings.tls_ca)
        self.servicer = YardServicer(self._settings, self.channel)
        yard_pb2_grpc.add_YardServiceServicer_to_server(self.servicer, self._server)
        self._register_health()
        await self._start_core()
        await self._server.start()
        await self._launcher.start()
        (home / "port").write_text(str(port))
        write_endpoint(home, self._yard_file())
        self._late_start = asyncio.create_task(self._start_late(), name="late-services")

    def _client_host(self) -> str:
        return "127.0.0.1" if self._settings.host in ("0.0.0.0", "::") else self._settings.host

    def _listen(self) -> int:
        settings = self._settings
        if settings.port:
            return servers.listen(self._server, settings.host, settings.port, settings.tls)
        try:
            last = int((settings.home / "port").read_text())
            return servers.listen(self._server, settings.host, last, settings.tls)
        except (FileNotFoundError, RuntimeError, ValueError):
            return servers.listen(self._server, settings.host, 0, settings.tls)

    def _register_health(self) -> None:
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def _start_core(self) -> None:
        """The scheduler, and the launcher before its work begins: it calls the scheduler through the server."""
        from servicekit.settings import from_environment
        from trainyard_launcher.app import Launcher
        from trainyard_launcher.backends.process import ProcessBackend
        from trainyard_launcher.settings import Settings as LauncherSettings
        from trainyard_scheduler.app import Scheduler
        from trainyard_scheduler.settings import Settings as SchedulerSettings

        home, environ = self._settings.home, self._settings.environ
        celery = celery_app()
        self._scheduler = Scheduler(
            home=home,
            database_url=f"sqlite:///{home}/scheduler.db",
            celery=celery,
            settings=from_environment(SchedulerSettings, "TRAINYARD_SCHEDULER", environ),
            registry=self.registry,
        )
        launcher_settings = from_environment(LauncherSettings, "TRAINYARD_LAUNCHER", environ)
        if self._settings.tls_ca:
            launcher_settings = launcher_settings.model_copy(update={"ca_file": str(self._settings.tls_ca)})
        if self._settings.ephemeral:
            launcher_settings = launcher_settings.model_copy(
                update={"tied_to_pid": os.getpid(), "tied_to_start_time": process_start_time(os.getpid()) or 0}
            )
        self._launcher = Launcher(
            home=home,
            celery=celery,
            endpoint=self.endpoint,
            token=self.token,
            tokens=self._tokens,
            backend=self._backend or ProcessBackend(home, launcher_settings),
            settings=launcher_settings,
        )
        for service in (self._scheduler, self._launcher):
            service.register(self._server)
            self._services.append(service)
        await self._scheduler.start()

    async def _start_late(self) -> None:
        try:
            metrics, artifacts = await asyncio.get_running_loop().run_in_executor(None, self._make_late)
            for name, service in ((_ARTIFACTS, artifacts), (_METRICS, metrics)):
                service.register(self._late.registrar(self._server))
                await service.start()
                self._services.append(service)
                self._late.open(name)
            await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
            await self._leftovers.deliver()
        except Exception as error:
            # A yard without one of its services would take jobs that cannot end well.
            logger.exception("a service did not start")
            self._late.fail()
            self.failure = error
            self.servicer.ended.set()

    def _make_late(self) -> tuple[Service, Service]:
        from servicekit.settings import from_environment
        from trainyard_artifacts.app import Artifacts
        from trainyard_artifacts.settings import Settings as ArtifactsSettings
        from trainyard_metrics.app import Metrics
        from trainyard_metrics.settings import Settings as MetricsSettings

        home, environ = self._settings.home, self._settings.environ
        return (
            Metrics(
                home=home,
                database_url=f"sqlite:///{home}/metrics.db",
                settings=from_environment(MetricsSettings, "TRAINYARD_METRICS", environ),
                registry=self.registry,
            ),
            Artifacts(
                home=home,
                database_url=f"sqlite:///{home}/artifacts.db",
                settings=from_environment(ArtifactsSettings, "TRAINYARD_ARTIFACTS", environ),
                registry=self.registry,
            ),
        )

    def _yard_file(self) -> YardFile:
        pid = os.getpid()
        return YardFile(
            endpoint=self.endpoint,
            pid=pid,
            start_time=process_start_time(pid) or 0,
            boot_id=boot_id(),
            version=version("trainyard-embedded"),
            ephemeral=self._settings.ephemeral,
        )

    async def stop(self) -> None:
        """Ends the services. Work goes on and is found again by the next yard, unless this one was ephemeral."""
        (self._settings.home / "yard.json").unlink(missing_ok=True)
        if self._late_start is not None:
            await asyncio.gather(self._late_start, return_exceptions=True)
        await self._leftovers.stop()
        for service in (self._launcher, *(s for s in reversed(self._services) if s is not self._launcher)):
            await service.stop()
        await self.channel.close()
        await self._server.stop(grace=0.5)
