"""A yard of which only the launcher is the product's: real gRPC, Celery and processes, and a scheduler we own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import trainyard_artifacts.app
import trainyard_metrics.app
from celery import Celery
from prometheus_client import CollectorRegistry
from servicekit import server as servers
from servicekit.auth import AttemptTokens, Authenticator, bearer_token
from servicekit.celery import celery_app
from servicekit.errors import InvalidArgument, Unavailable
from servicekit.ids import new_id
from servicekit.messages import FORGET, LAUNCH, STOP, start_queue, stop_queue
from trainyard.channel import connect
from trainyard.spec import Metadata, Resources, Secret, SecretSource, Spec, TrainingJob
from trainyard_launcher.app import Launcher
from trainyard_launcher.backends.process import ProcessBackend, agents, backend
from trainyard_launcher.settings import Settings
from trainyard_protos.v1 import (
    artifacts_pb2_grpc,
    launcher_pb2_grpc,
    metrics_pb2,
    metrics_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)

from scripts.testbed.patience import PATIENCE_S
from scripts.testbed.ports import free_port

SMALL_AGENT = (sys.executable, str(Path(__file__).with_name("small_agent.py")))
WAIT_S = PATIENCE_S
ENDED, PUBLISHING = scheduler_pb2.ATTEMPT_PHASE_ENDED, scheduler_pb2.ATTEMPT_PHASE_PUBLISHING
Report = scheduler_pb2.ReportAttemptRequest


class Scheduler(scheduler_pb2_grpc.AttemptServiceServicer, scheduler_pb2_grpc.SchedulerServiceServicer):
    """Holds what the launcher is to believe, and remembers what it said."""

    def __init__(self) -> None:
        self.assignments: dict[str, scheduler_pb2.Assignment] = {}
        self.assigned_state = "claimed"
        self.stale: set[str] = set()
        self.stale_reports: set[str] = set()
        self.away = False
        self.picky_about: set[str] = set()  # reasons of exits that are refused for good
        self.refused = 0
        self.stopping: set[str] = set()
        self.reports: list[Report] = []
        self.claims: list[str] = []
        self.pools: list[scheduler_pb2.RegisterPoolRequest] = []
        self.job_state = scheduler_pb2.JOB_STATE_RUNNING
        self.no_pools = False
        self.renew_after_s = 0.05
        self.ready = False
        self.lists = 0
        self.published: dict[str, list[str]] = {}  # by attempt, the phases that were reported before
        self.cancelled_late: set[str] = set()  # just before they were to be published
        self.stale_late: set[str] = set()
        self.closings: set[tuple[str, str, str, str, int]] = set()
        self.tombstones: list[scheduler_pb2.Tombstone] = []
        self.holdings: list[scheduler_pb2.ReportHoldingsRequest.Holding] = []
        self._news = asyncio.Condition()

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(happened)

    async def closed(self, service: str, request: metrics_pb2.CloseAttemptRequest) -> None:
        """A service was told the end of an attempt."""
        self.closings.add((service, request.workspace, request.job_id, request.attempt_id, request.fence))
        await self.tell()

    async def tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    def phases(self, attempt_id: str) -> list[str]:
        names = {1: "started", 2: "finishing", 3: "ended", 4: "publishing"}
        return [names[each.phase] for each in self.reports if each.attempt_id == attempt_id and each.phase]

    def notes(self, reason: str) -> list[Report]:
        return [each for each in self.reports if each.note_reason == reason]

    async def ended(self, attempt_id: str) -> Report:
        found: list[Report] = []

        def look() -> bool:
            found[:] = [each for each in self.reports if each.attempt_id == attempt_id and each.phase == ENDED]
            return bool(found)

        await self.until(look)
        return found[0]

    async def RegisterPool(self, request, context):
        self.pools.append(request)
        await self.tell()
        if self.no_pools:
            raise InvalidArgument("no pool is taken now", reason="InvalidMachines")
        return scheduler_pb2.RegisterPoolResponse(renew_after_s=self.renew_after_s)

    async def registered(self, ready: bool) -> None:
        """What the launcher says of itself."""
        self.ready = ready
        await self.tell()

    async def _answer(self) -> None:
        if self.away:
            self.refused += 1
            await self.tell()
            raise Unavailable("away", reason="Away")

    async def ClaimAttempt(self, request, context):
        await self._answer()
        self.claims.append(request.attempt_id)
        await self.tell()
        assignment = self.assignments.get(request.attempt_id)
        if assignment is None or request.attempt_id in self.stale or assignment.fence != request.fence:
            return scheduler_pb2.ClaimAttemptResponse(stale=True, stale_reason="no such attempt")
        assignment.stopping = request.attempt_id in self.stopping
        return scheduler_pb2.ClaimAttemptResponse(assignment=assignment)

    async def ClaimAttempts(self, request, context):
        answers = [await self.ClaimAttempt(each, context) for each in request.requests]
        results = [scheduler_pb2.ClaimAttemptsResponse.Result(answer=answer) for answer in answers]
        return scheduler_pb2.ClaimAttemptsResponse(results=results)

    async def ReportAttempts(self, request, context):
        answers = [await self.ReportAttempt(each, context) for each in request.requests]
        results = [scheduler_pb2.ReportAttemptsResponse.Result(answer=answer) for answer in answers]
        return scheduler_pb2.ReportAttemptsResponse(results=results)

    async def ReportAttempt(self, request, context):
        await self._answer()
        if request.exit.reason in self.picky_about:
            raise InvalidArgument("this exit fits into no column", reason="ValueOutOfRange")
        self.reports.append(request)
        if request.phase == ENDED:
            self.assignments.pop(request.attempt_id, None)
        await self.tell()
        return scheduler_pb2.ReportAttemptResponse(
            stale=request.attempt_id
            in self.stale_reports | (self.stale_late if request.phase == PUBLISHING else set()),
            stop=request.attempt_id in self.stopping | (self.cancelled_late if request.phase == PUBLISHING else set()),
        )

    async def ListAssigned(self, request, context):
        self.lists += 1
        await self.tell()
        return scheduler_pb2.ListAssignedResponse(
            attempts=[
                scheduler_pb2.ListAssignedResponse.Assigned(
                    attempt_id=each.attempt_id,
                    fence=each.fence,
                    state=self.assigned_state,
                    stopping=each.attempt_id in self.stopping,
                    job_id=each.job_id,
                    workspace=each.workspace,
                )
                for each in self.assignments.values()
                if each.attempt_id in self.claims
            ]
        )

    async def ListTombstones(self, request, context):
        await self._answer()
        return scheduler_pb2.ListTombstonesResponse(
            tombstones=[each for each in self.tombstones if each.pool in (request.pool, "")]
        )

    async def ConfirmTombstones(self, request, context):
        self.tombstones = [each for each in self.tombstones if each not in request.tombstones]
        await self.tell()
        return scheduler_pb2.ConfirmTombstonesResponse()

    async def ReportHoldings(self, request, context):
        await self._answer()
        self.holdings += request.holdings
        await self.tell()
        return scheduler_pb2.ReportHoldingsResponse()

    async def GetJob(self, request, context):
        return scheduler_pb2.Job(id=request.id, state=self.job_state)

    async def Watch(self, request, context):
        async with self._news:
            await self._news.wait_for(lambda: self.job_state == scheduler_pb2.JOB_STATE_SUCCEEDED)
        yield scheduler_pb2.Event(state=self.job_state)


class Metrics(metrics_pb2_grpc.MetricsServiceServicer):
    def __init__(self, scheduler: Scheduler) -> None:
        self.deleted: list[tuple[str, str]] = []
        self.broken: set[str] = set()  # jobs whose runs cannot be removed
        self._scheduler = scheduler

    async def DeleteJobRuns(self, request, context):
        if request.job_id in self.broken:
            raise RuntimeError("a file of this run cannot be removed")
        self.deleted.append((request.workspace, request.job_id))
        await self._scheduler.tell()
        return metrics_pb2.DeleteJobRunsResponse()

    async def CloseAttempt(self, request, context):
        await self._scheduler.closed("metrics", request)
        return metrics_pb2.CloseAttemptResponse()


class Artifacts(artifacts_pb2_grpc.ArtifactServiceServicer):
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def CloseAttempt(self, request, context):
        if request.succeeded:
            self._scheduler.published[request.attempt_id] = self._scheduler.phases(request.attempt_id)
        await self._scheduler.closed("artifacts", request)
        return metrics_pb2.CloseAttemptResponse()


class Gate(grpc.aio.ServerInterceptor):
    """Keeps calls of a service out while it is closed, as one does that is away."""

    def __init__(self, service: str) -> None:
        self.closed = False
        self._service = service

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if not self.closed or self._service not in details.method:
            return handler

        async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{self._service} is away")

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)


class Yard:
    """The launcher under test and its surroundings; `launcher` may be another one after `restart`."""

    def __init__(self, home: Path, settings: Settings, agent: Sequence[str], *, records: bool = False) -> None:
        """
        Args:
            records: real metrics behind `gate`, real artifacts behind `store_gate`, instead of ones that store nothing.
        """
        self.home, self.settings, self.agent = home, settings, agent
        self.scheduler = Scheduler()
        self.metrics = Metrics(self.scheduler)
        self.gate, self.store_gate = Gate("MetricsService"), Gate("ArtifactService")
        self._records = records
        self._services: list[trainyard_metrics.app.Metrics | trainyard_artifacts.app.Artifacts] = []
        self.celery: Celery
        self.registry: CollectorRegistry
        self.token = bearer_token(home)
        self.tokens = AttemptTokens.load_or_create(home)
        self.port = free_port()  # kept while it is away
        self._server: grpc.aio.Server | None = None
        self._launcher: Launcher | None = None

    async def open(self, early: Callable[[], Awaitable[None]] | None = None) -> None:
        """`early`: what happens when the server answers and the launcher has not yet looked at what it left."""
        self._server = servers.build(
            Authenticator(self.token, self.tokens), CollectorRegistry(), [self.gate, self.store_gate]
        )
        self.port = servers.listen(self._server, "127.0.0.1", self.port)
        scheduler_pb2_grpc.add_AttemptServiceServicer_to_server(self.scheduler, self._server)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self.scheduler, self._server)
        if self._records:
            self._services = [
                trainyard_metrics.app.Metrics(home=self.home, database_url=f"sqlite:///{self.home}/metrics.db"),
                trainyard_artifacts.app.Artifacts(home=self.home, database_url=f"sqlite:///{self.home}/artifacts.db"),
            ]
            for service in self._services:
                service.register(self._server)
                await service.start()
        else:
            metrics_pb2_grpc.add_MetricsServiceServicer_to_server(self.metrics, self._server)
            artifacts_pb2_grpc.add_ArtifactServiceServicer_to_server(Artifacts(self.scheduler), self._server)
        self.celery = celery_app()
        self.registry = CollectorRegistry()
        self._launcher = Launcher(
            home=self.home,
            celery=self.celery,
            endpoint=f"127.0.0.1:{self.port}",
            token=self.token,
            tokens=self.tokens,
            backend=ProcessBackend(self.home, self.settings, self.agent),
            registered=self.scheduler.registered,
            settings=self.settings,
            registry=self.registry,
        )
        self._launcher.register(self._server)
        await self._server.start()
        if early is not None:
            await early()
        await self._launcher.start()
        self.channel = connect(f"127.0.0.1:{self.port}", self.token)
        self.user = launcher_pb2_grpc.LauncherServiceStub(self.channel)

    async def close(self) -> None:
        assert self._launcher and self._server
        await self.channel.close()
        await self._launcher.stop()
        await self._server.stop(None)
        for service in self._services:
            await service.stop()

    async def restart(self) -> None:
        await self.close()
        await self.open()

    def assign(self, command: Sequence[str], *, job_id: str = "", fence: int = 1, **fields: object) -> str:
        """Gives the launcher an attempt to claim; returns its id."""
        attempt_id = new_id()
        spec = {"resources": Resources(cpu=1, memory="512Mi"), "grace_period": "5s", **fields}
        job = TrainingJob(metadata=Metadata(name="test"), spec=Spec(command=tuple(command), **spec))
        self.scheduler.assignments[attempt_id] = scheduler_pb2.Assignment(
            workspace="default",
            job_id=job_id or new_id(),
            job_name="test",
            attempt_id=attempt_id,
            fence=fence,
            pool=self.settings.pool,
            spec=job.to_json(),
            database_id="database-1",
        )
        return attempt_id

    def job_of(self, attempt_id: str) -> str:
        return self.scheduler.assignments[attempt_id].job_id

    def send_launch(self, attempt_id: str, fence: int = 1) -> None:
        self.celery.send_task(
            LAUNCH, kwargs={"attempt_id": attempt_id, "fence": fence}, queue=start_queue(self.settings.pool)
        )

    def send_stop(self, attempt_id: str, fence: int = 1) -> None:
        self.celery.send_task(
            STOP, kwargs={"attempt_id": attempt_id, "fence": fence}, queue=stop_queue(self.settings.pool)
        )

    def remove(self, job_id: str, attempt_ids: list[str], workspace: str = "default") -> None:
        """Removes a job from the scheduler, which does not tell the launcher."""
        tombstone = {"workspace": workspace, "job_id": job_id}
        self.scheduler.tombstones += [
            scheduler_pb2.Tombstone(**tombstone, pool=self.settings.pool, attempt_ids=attempt_ids),
            scheduler_pb2.Tombstone(**tombstone),
        ]

    def send_forget(self, job_id: str, attempt_ids: list[str], **more: str) -> None:
        """Removes a job from the scheduler, which tells the launcher."""
        self.remove(job_id, attempt_ids, **more)
        kwargs = {"job_id": job_id, "attempt_ids": attempt_ids} | more
        self.celery.send_task(FORGET, kwargs=kwargs, queue=stop_queue(self.settings.pool))

    async def removed(self) -> None:
        """Waits until the launcher has confirmed every tombstone."""
        await self.scheduler.until(lambda: not self.scheduler.tombstones)

    async def run(self, command: Sequence[str], **fields: object) -> str:
        """Starts an attempt and waits until all of its nodes run."""
        attempt_id = self.assign(command, **fields)
        self.send_launch(attempt_id)
        await self.scheduler.until(lambda: "started" in self.scheduler.phases(attempt_id))
        return attempt_id

    def node(self, attempt_id: str, index: int = 0) -> Path:
        return self.home / "attempts" / attempt_id / f"node-{index}"


@asynccontextmanager
async def running_yard(
    home: Path, agent: Sequence[str] = SMALL_AGENT, *, records: bool = False, **settings: object
) -> AsyncIterator[Yard]:
    patience = {"call_timeout_s": WAIT_S, "stacks_timeout_s": WAIT_S, "sweep_timeout_s": WAIT_S}
    defaults: dict[str, object] = {"pool": new_id(), "capacity_gpu": 4, "stop_slack_s": 2, **patience}
    yard = Yard(home, Settings(**(defaults | settings)), agent, records=records)
    with _agents_reaped():
        await yard.open()
        try:
            yield yard
        finally:
            for attempt_id in list(yard.scheduler.assignments):
                if attempt_id in yard.scheduler.claims and yard.node(attempt_id).exists():
                    from trainyard_launcher.backends.process import sweep

                    await asyncio.to_thread(sweep.end_all, sweep.Target(attempt_id), WAIT_S)
            await yard.close()


@contextmanager
def _agents_reaped() -> Iterator[None]:
    """Agents go on without their launcher, which is in this process: so they are this process's to end and to reap."""
    children: list[subprocess.Popen[bytes]] = []

    def spawn(*arguments: Any) -> subprocess.Popen[bytes]:
        children.append(agents.spawn(*arguments))
        return children[-1]

    with mock.patch.object(backend, "spawn", spawn):
        yield
    for child in children:
        child.kill()
        child.wait()


def secret(name: str, env: str) -> Secret:
    return Secret(name=name, from_=SecretSource(env=env))
