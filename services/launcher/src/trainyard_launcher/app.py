"""The launcher as a service: wires its parts, registers its servicers, begins and ends its work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
from celery import Celery
from prometheus_client import CollectorRegistry
from servicekit.auth import AttemptTokens
from servicekit.celery import Worker
from servicekit.messages import start_queue, stop_queue
from trainyard.channel import connect
from trainyard_protos.v1 import artifacts_pb2_grpc, launcher_pb2_grpc, metrics_pb2_grpc, scheduler_pb2_grpc

from trainyard_launcher import tasks
from trainyard_launcher.backend import Backend
from trainyard_launcher.background import Background
from trainyard_launcher.closing import Closing
from trainyard_launcher.exporter import LauncherCollector
from trainyard_launcher.follow import JobFollower
from trainyard_launcher.orphans import OrphanReporter
from trainyard_launcher.plan import Planner
from trainyard_launcher.reconcile import Reconciler
from trainyard_launcher.registration import keep_registered, launcher_id
from trainyard_launcher.removal import Removal
from trainyard_launcher.servicer import LauncherServicer
from trainyard_launcher.sessions import AgentServicer
from trainyard_launcher.settings import Settings
from trainyard_launcher.stacks import StacksDesk
from trainyard_launcher.supervisor import Supervisor

logger = logging.getLogger(__name__)


class Launcher:
    """Runs attempts on one pool's backend. Make it on the loop it will run on.

    Args:
        home: the yard's folder.
        celery: application whose messages it acts on.
        endpoint: `host:port` of the yard, for itself and its agents.
        token: the users' token of the yard.
        tokens: mints attempt tokens.
        backend: where nodes run.
        registered: told whether the scheduler takes this launcher's pool.
        registry: where its numbers are shown; one of its own without.
    """

    name = "launcher"

    def __init__(
        self,
        *,
        home: Path,
        celery: Celery,
        endpoint: str,
        token: str,
        tokens: AttemptTokens,
        backend: Backend,
        registered: Callable[[bool], Awaitable[None]],
        settings: Settings | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._settings = settings = settings or Settings()
        self._celery = celery
        self._backend = backend
        self._registered = registered
        self._id = settings.identity or launcher_id(home)
        self._channel = connect(endpoint, token, Path(settings.ca_file) if settings.ca_file else None)
        self._attempt_service = scheduler_pb2_grpc.AttemptServiceStub(self._channel)
        self._metrics = metrics_pb2_grpc.MetricsServiceStub(self._channel)
        self._artifacts = artifacts_pb2_grpc.ArtifactServiceStub(self._channel)
        self._supervisor = Supervisor(
            stub=self._attempt_service,
            backend=backend,
            planner=Planner(tokens, endpoint, home, settings),
            closing=Closing(self._channel, tokens, settings.call_timeout_s),
            launcher_id=self._id,
            settings=settings,
        )
        (registry or CollectorRegistry()).register(LauncherCollector(self._supervisor.attempts, settings.pool))
        self._stacks = StacksDesk(settings.stacks_timeout_s)
        self._tokens = tokens
        self._background = Background()
        self._workers: list[Worker] = []

    def register(self, server: grpc.aio.Server) -> None:
        """Adds LauncherService and AgentService to a server."""
        settings, attempts = self._settings, self._supervisor.attempts
        follower = JobFollower(
            attempts, scheduler_pb2_grpc.SchedulerServiceStub(self._channel), settings.call_timeout_s
        )
        users = LauncherServicer(attempts, self._backend, follower, self._stacks, self._supervisor.note, settings)
        agents = AgentServicer(self._supervisor, self._backend, self._tokens, self._stacks, settings)
        launcher_pb2_grpc.add_LauncherServiceServicer_to_server(users, server)
        launcher_pb2_grpc.add_AgentServiceServicer_to_server(agents, server)

    async def start(self) -> None:
        """Takes over what runs, then takes work. The scheduler need not answer yet.

        Raises:
            TimeoutError: the broker was not reached.
        """
        settings = self._settings
        await self._supervisor.open()
        reconciler = Reconciler(self._attempt_service, self._supervisor, self._id, settings)
        registration = keep_registered(self._attempt_service, self._backend, self._id, settings, self._registered)
        self._background.run(registration, "registration")
        self._background.run(reconciler.run(), "reconcile")
        removal = Removal(
            self._attempt_service,
            self._metrics,
            self._artifacts,
            self._supervisor,
            self._backend,
            self._id,
            settings,
        )
        self._background.run(removal.run(), "removal")
        orphans = OrphanReporter(self._attempt_service, self._metrics, self._backend, settings)
        self._background.run(orphans.run(), "orphans")
        tasks.register(
            self._celery,
            asyncio.get_running_loop(),
            settings.task_timeout_s,
            launch=self._supervisor.launch,
            stop=self._supervisor.stop,
            forget=removal.wake,
        )
        self._workers = [
            Worker(self._celery, [start_queue(settings.pool)], settings.start_concurrency),
            Worker(self._celery, [stop_queue(settings.pool)], settings.stop_concurrency),
        ]
        try:
            await asyncio.gather(*(asyncio.to_thread(worker.start) for worker in self._workers))
        except BaseException:  # also when this start is given up: their threads wait for the broker
            for worker in self._workers:
                worker.stop(timeout_s=0)
            raise

    async def stop(self) -> None:
        """Takes no more work and stops watching; what runs goes on and is found again."""
        await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in self._workers))
        await self._background.close()
        await self._supervisor.close()
        await self._channel.close()
