"""What tests do with a scheduler, in the words of its contract."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
from celery import Celery
from kombu import Queue
from prometheus_client import CollectorRegistry
from servicekit import clock
from servicekit.auth import AttemptTokens
from trainyard_protos.v1 import common_pb2 as c
from trainyard_protos.v1 import scheduler_pb2 as s
from trainyard_protos.v1 import scheduler_pb2_grpc
from trainyard_scheduler.app import Scheduler

from scripts.testbed.patience import PATIENCE_S

LAUNCHER = "launcher-1"
ENDS = (s.JOB_STATE_SUCCEEDED, s.JOB_STATE_FAILED, s.JOB_STATE_CANCELLED)


def document(name: str = "digits", labels: dict[str, str] | None = None, **spec: Any) -> str:
    """A document as JSON; a part of `spec` replaces the default."""
    metadata: dict[str, Any] = {"name": name}
    if labels:
        metadata["labels"] = labels
    whole = {"command": ["true"], "resources": {"cpu": 1, "memory": "1Gi"}, **spec}
    return json.dumps(
        {"apiVersion": "trainyard.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": whole}
    )


def exit_of(reason: str = "WorkerFailed", **fields: Any) -> c.Exit:
    return c.Exit(reason=reason, **fields)


COMPLETED = c.Exit(reason="Completed", exit_code=0, acknowledged=True)


class Clock(clock.Clock):
    """Time that stands still until it is moved.

    Attributes:
        now_ns: UTC.
    """

    def __init__(self) -> None:
        self.now_ns = 1_800_000_000_000_000_000
        self._stepped_ns = self._slept_ns = 0
        super().__init__()

    def utc_ns(self) -> int:
        return self.now_ns

    def steady_ns(self) -> int:
        return self.now_ns - self._stepped_ns

    def awake_ns(self) -> int:
        return self.steady_ns() - self._slept_ns

    def step(self, seconds: float) -> None:
        """Somebody sets the wall clock."""
        self.now_ns += int(seconds * 1e9)
        self._stepped_ns += int(seconds * 1e9)

    def sleep(self, seconds: float) -> None:
        """The machine sleeps."""
        self.now_ns += int(seconds * 1e9)
        self._slept_ns += int(seconds * 1e9)


@dataclass
class Yard:
    """A scheduler's users and its launcher."""

    channel: grpc.aio.Channel
    scheduler: Scheduler
    celery: Celery
    registry: CollectorRegistry
    port: int
    tokens: AttemptTokens

    def __post_init__(self) -> None:
        self.users = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)
        self.launchers = scheduler_pb2_grpc.AttemptServiceStub(self.channel)

    def move(self, clock: Clock, seconds: float) -> None:
        """Lets time pass."""
        clock.now_ns += int(seconds * 1e9)
        self.scheduler._index.timers.look()

    async def message(self, queue: str, key: str, value: str) -> dict[str, Any]:
        """Takes messages from a queue until one has this content; other tests' queues have the same names."""
        return await asyncio.to_thread(self._take, queue, key, value)

    def _take(self, queue: str, key: str, value: str) -> dict[str, Any]:
        with self.celery.connection_for_read() as connection:
            waiting = connection.SimpleQueue(Queue(queue, routing_key=queue), no_ack=True)
            while True:
                message = waiting.get(timeout=PATIENCE_S)
                content: dict[str, Any] = json.loads(message.body)[1]
                if content.get(key) == value:
                    return {"task": message.headers["task"], **content}

    async def register(self, cpu: float = 4, memory_gi: int = 8, gpu: int = 0, **fields: Any) -> None:
        machine = s.Machine(name="m0", total=c.Resources(cpu=cpu, memory_bytes=memory_gi << 30, gpu=gpu))
        request = {"pool": "local", "launcher_id": LAUNCHER, "machines": [machine], "lease_s": 60.0, **fields}
        await self.launchers.RegisterPool(s.RegisterPoolRequest(**request))

    async def submit(self, text: str = "", key: str = "", **fields: Any) -> s.Job:
        request = s.SubmitRequest(
            document=s.Document(text=text or document(), filename="job.yaml"), idempotency_key=key, **fields
        )
        return (await self.users.Submit(request)).job

    async def job(self, job_id: str) -> s.Job:
        return await self.users.GetJob(s.GetJobRequest(id=job_id))

    async def events(self, job_id: str = "") -> list[s.Event]:
        return list((await self.users.ListEvents(s.ListEventsRequest(job=job_id))).events)

    async def tombstones(self, pool: str = "local") -> list[s.Tombstone]:
        """Of all pages."""
        found: list[s.Tombstone] = []
        request = s.ListTombstonesRequest(pool=pool)
        while True:
            page = await self.launchers.ListTombstones(request)
            found += page.tombstones
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    async def forgotten(self, job_id: str) -> None:
        """Waits until a job has been removed."""
        async with asyncio.timeout(PATIENCE_S):
            while job_id in [job.id for job in (await self.users.ListJobs(s.ListJobsRequest())).jobs]:
                await asyncio.sleep(0.02)

    async def watch(self, job_id: str, after_seq: int = 0) -> AsyncIterator[s.Event]:
        async for event in self.users.Watch(s.WatchRequest(job=job_id, after_seq=after_seq)):
            yield event

    async def until(self, job_id: str, event_type: str, after_seq: int = 0) -> s.Event:
        """Waits for an event of a job; the test's own time limit is the deadline."""
        async with asyncio.timeout(PATIENCE_S):
            async for event in self.watch(job_id, after_seq):
                if event.type == event_type:
                    return event
        raise AssertionError("a watch never ends by itself")

    async def admitted(self, job_id: str) -> s.Job:
        """The job once an attempt of it, newer than any that ended, is there."""
        job = await self.job(job_id)
        if job.state == s.JOB_STATE_QUEUED:
            await self.until(job_id, "Admitted", job.event_seq)
        return await self.job(job_id)

    async def claim(self, job: s.Job, launcher: str = LAUNCHER) -> s.ClaimAttemptResponse:
        request = s.ClaimAttemptRequest(attempt_id=job.attempt_id, fence=job.attempt, launcher_id=launcher)
        return await self.launchers.ClaimAttempt(request)

    async def report(
        self, job: s.Job, phase: "s.AttemptPhase", exit: c.Exit | None = None, launcher: str = LAUNCHER, **fields: Any
    ) -> s.ReportAttemptResponse:
        request = s.ReportAttemptRequest(
            attempt_id=job.attempt_id, fence=job.attempt, launcher_id=launcher, phase=phase, exit=exit, **fields
        )
        return await self.launchers.ReportAttempt(request)

    async def started(self, job_id: str) -> s.Job:
        """The job, admitted, claimed and running."""
        job = await self.admitted(job_id)
        assert not (await self.claim(job)).stale
        await self.report(job, s.ATTEMPT_PHASE_STARTED)
        return await self.job(job_id)

    async def ended(self, job_id: str, exit: c.Exit) -> s.Job:
        """The job after one attempt that ends so."""
        job = await self.started(job_id)
        await self.report(job, s.ATTEMPT_PHASE_ENDED, exit)
        return await self.job(job_id)
