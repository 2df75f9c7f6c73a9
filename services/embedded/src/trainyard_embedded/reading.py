"""The yard that commands share to read what is stored while no yard is up: decision 0036.

It is no writer. Databases are opened for reading, files are read as they are, and nothing runs by itself: no admission,
no launcher, no delivery, no retention, no removal. So a real yard may start at any time, beside it. A service is
started by the first call to it, and the process ends with the commands that are attached to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import grpc
from inotify_simple import Event, flags
from servicekit.auth import AttemptVerifier, Principal, bearer_token
from servicekit.errors import FailedPrecondition, ServiceError, Unauthenticated, Unavailable
from servicekit.host import Host
from trainyard.agent.changes import Changes
from trainyard.endpoints import join_host_port
from trainyard.home import READER_FILE, YARD_FILE, YardFile, read_endpoint
from trainyard_protos.v1 import yard_pb2_grpc
from trainyard_scheduler.yard_servicer import YardFacts

from trainyard_embedded.late import StartedServer
from trainyard_embedded.published import Published
from trainyard_embedded.settings import YardSettings
from trainyard_embedded.yard_servicer import ReadingYardServicer

if TYPE_CHECKING:
    from servicekit.service import Service

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_GRACE_S = 30.0
"""How long commands that read may take to end once a real yard is up: less than it waits before it compacts a run."""

_METHODS = {
    "SchedulerService": (
        "scheduler",
        ("Plan", "GetJob", "ListJobs", "ListEvents", "Watch", "ExplainJob", "ListPools"),
    ),
    "SchedulerAdminService": ("scheduler", ("GetUsage",)),
    "LauncherService": ("launcher", ("GetUsage",)),
    "MetricsService": ("metrics", ("ListRuns", "SearchRuns", "ListSeries", "QuerySeries", "WatchSeries", "ReadLogs")),
    "MetricsAdminService": ("metrics", ("GetUsage", "ListAdminEvents")),
    "ArtifactService": (
        "artifacts",
        (
            "GetVersion",
            "ListArtifacts",
            "ListVersions",
            "ListFiles",
            "ReadFile",
            "GetChunks",
            "GetLineage",
            "GetRetention",
        ),
    ),
    "ArtifactAdminService": ("artifacts", ("GetUsage", "ListAdminEvents")),
}
_READS = {
    f"/trainyard.v1.{name}/{method}": service for name, (service, methods) in _METHODS.items() for method in methods
}
"""The service of each method that reads."""
_OWN = ("/trainyard.v1.YardService/", "/grpc.health.v1.Health/")


class ReadingYard:
    """The services of one machine's yard as far as they read."""

    def __init__(self, settings: YardSettings) -> None:
        self._settings = settings
        self._services: dict[str, asyncio.Task[Service]] = {}
        self.endpoint = ""
        self.failure: Exception | None = None

    async def start(self) -> None:
        """Serves; each service comes up with the first call to it.

        Raises:
            ValueError: the home has no token.
        """
        home = self._settings.home
        gate = _Gate(self._ready)
        services = sorted({service for service, _ in _METHODS.values()})
        self._host = Host(services, home, bearer_token(home), _NoAttempts(), before=[gate])
        self.endpoint = join_host_port(_HOST, self._host.listen(_HOST, 0))
        self.servicer = ReadingYardServicer(YardFacts(home=str(home), ephemeral=True))
        yard_pb2_grpc.add_YardServiceServicer_to_server(self.servicer, self._host.server)
        await self._host.server.start()
        # Commands begin with the jobs: the scheduler need not wait to be asked.
        self._begin("scheduler")
        yard = YardFile.of_this_process(self.endpoint, version("trainyard-embedded"), ephemeral=True)
        self._published = Published(home, yard, READER_FILE)
        self._changes = Changes(lambda reason, text: logger.warning(text, extra={"reason": reason}))
        self._changes.watch(home, flags.MOVED_TO | flags.MOVED_FROM | flags.DELETE, self._on_change)
        self._on_change(None)

    async def whole(self) -> None:
        """Returns at once: services come up when they are called."""

    async def stop(self) -> None:
        """Ends the services."""
        self._published.withdraw()
        self._changes.close()
        for started in await asyncio.gather(*self._services.values(), return_exceptions=True):
            if not isinstance(started, BaseException):
                await started.stop()
        await self._host.stop()

    def _on_change(self, event: Event | None) -> None:
        if event is not None and event.name != YARD_FILE:
            return
        if read_endpoint(self._settings.home) is not None:
            self.servicer.give_way(_GRACE_S)
        else:
            self.servicer.stay()

    async def _ready(self, name: str) -> None:
        await asyncio.shield(self._begin(name))

    def _begin(self, name: str) -> asyncio.Task[Service]:
        if name not in self._services:
            self._services[name] = asyncio.create_task(self._start(name), name=f"start {name}")
        return self._services[name]

    async def _start(self, name: str) -> Service:
        try:
            service = await asyncio.get_running_loop().run_in_executor(None, self._make, name)
            service.register(cast(grpc.aio.Server, StartedServer(self._host.server)))
            await service.start()
        except Exception as error:
            logger.exception("a service did not start", extra={"service": name})
            raise Unavailable(
                f"{name} cannot be read without a yard: {error}",
                reason="NotReadable",
                hint="start a yard with 'yard up'",
            ) from error
        await self._host.health.set(name, True)
        return service

    def _make(self, name: str) -> Service:
        home, environ, registry = self._settings.home, self._settings.environ, self._host.registry
        url = f"sqlite:///{home}/{name}.db"
        if name == "scheduler":
            from trainyard_scheduler.compose import compose as compose_scheduler

            return compose_scheduler(home=home, database_url=url, celery=None, registry=registry, environ=environ)
        if name == "launcher":
            from trainyard_launcher.reading import ReadingLauncher

            return ReadingLauncher(home)  # type: ignore[abstract]  # other methods are refused before they get there
        if name == "metrics":
            from trainyard_metrics.compose import compose as compose_metrics

            return compose_metrics(home=home, database_url=url, registry=registry, environ=environ, read_only=True)
        from trainyard_artifacts.compose import compose as compose_artifacts

        return compose_artifacts(home=home, database_url=url, registry=registry, environ=environ, read_only=True)


class _Gate(grpc.aio.ServerInterceptor):
    """Lets calls that read through, once their service is up, and refuses all others.

    Args:
        ready: returns when a service is up.
    """

    def __init__(self, ready: Callable[[str], Awaitable[None]]) -> None:
        self._ready = ready

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        method = str(details.method)
        if not method.startswith(_OWN):
            try:
                await self._ready_for(method)
            except ServiceError as error:
                return _refusal(error)
        return await continuation(details)

    async def _ready_for(self, method: str) -> None:
        service = _READS.get(method)
        if service is None:
            raise FailedPrecondition(
                f"{method} is not for a yard that only reads",
                reason="ReadOnlyYard",
                hint="start a yard with 'yard up'",
            )
        await self._ready(service)


def _refusal(error: ServiceError) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(error.code, error.message, trailing_metadata=error.trailing_metadata())

    return grpc.stream_stream_rpc_method_handler(refuse)


class _NoAttempts(AttemptVerifier):
    """Knows no attempts: their agents never call this yard."""

    def __init__(self) -> None:
        """There is no key."""

    def verify(self, token: str) -> Principal:
        raise Unauthenticated("this yard serves its user alone", reason="BadAttemptToken")
