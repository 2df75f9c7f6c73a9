"""A scheduler that is killed again and again loses nothing and starts nothing twice."""

import asyncio
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from queue import Empty
from typing import Any

import grpc
import pytest
from kombu import Queue
from servicekit.auth import bearer_token
from trainyard.channel import connect
from trainyard_protos.v1 import common_pb2 as c
from trainyard_protos.v1 import scheduler_pb2 as s
from trainyard_protos.v1 import scheduler_pb2_grpc

from scripts.testbed.patience import PATIENCE_S
from scripts.testbed.ports import free_port
from services.scheduler.tests import killable
from services.scheduler.tests.yard import COMPLETED, ENDS, LAUNCHER, document, exit_of

JOBS = 40
KILLS = 6
CPUS = 4
FAILS_FIRST = 5  # every fifth job's first attempt fails


class Victim:
    """The process, killed after a random number of answered calls and started again on the same port and home."""

    def __init__(self, home: Path, seed: int, database_url: str) -> None:
        self.home = home
        self.database_url = database_url
        self.random = random.Random(seed)
        self.kills = 0
        self.answered = 0
        self.next_kill = self.random.randint(1, 40)
        self.port = free_port()

    async def start(self) -> None:
        arguments = (str(Path(killable.__file__)), str(self.home), str(self.port), self.database_url)
        self.process = await asyncio.create_subprocess_exec(sys.executable, *arguments)

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def count(self) -> None:
        """Called after every answer; kills when it is time."""
        self.answered += 1
        if self.kills < KILLS and self.answered >= self.next_kill:
            self.kills += 1
            self.next_kill = self.answered + self.random.randint(1, 60)
            await self.kill()
            await self.start()


class Client:
    """Calls that are tried until they are answered, as the real clients do."""

    def __init__(self, channel: grpc.aio.Channel, victim: Victim) -> None:
        self.users = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self.launchers = scheduler_pb2_grpc.AttemptServiceStub(channel)
        self.victim = victim

    async def call(self, method: Callable[..., Any], request: Any) -> Any:
        while True:
            try:
                answer = await method(request, wait_for_ready=True, timeout=PATIENCE_S)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
            else:
                await self.victim.count()
                return answer


class Launcher:
    """Takes messages, claims, pretends to run. Remembers what it started."""

    def __init__(self, client: Client, home: Path) -> None:
        self.client = client
        self.home = home
        self.started: Counter[str] = Counter()
        self.running = 0
        self.most = 0

    async def run(self, finished: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            while not finished.is_set():
                message = await asyncio.to_thread(self._take)
                if message is not None:
                    tasks.create_task(self._launch(message))

    def _take(self) -> dict[str, Any] | None:
        with killable.broker(self.home).connection_for_read() as connection:
            name = "pool.local.start"
            try:
                message = connection.SimpleQueue(Queue(name, routing_key=name), no_ack=True).get(timeout=0.2)
            except (Empty, ValueError):  # a message torn by a kill is a lost message, which the scheduler makes good
                return None
            content: dict[str, Any] = json.loads(message.body)[1]
            return content

    async def _launch(self, message: dict[str, Any]) -> None:
        request = s.ClaimAttemptRequest(**message, launcher_id=LAUNCHER)
        claimed = await self.client.call(self.client.launchers.ClaimAttempt, request)
        # A launcher starts an attempt once, however often it is told to: the agent's O_EXCL.
        if claimed.stale or self.started[message["attempt_id"]]:
            return
        self.started[message["attempt_id"]] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        fails = int(claimed.assignment.job_name.split("-")[1]) % FAILS_FIRST == 0 and claimed.assignment.fence == 1
        exit = exit_of(exit_code=1) if fails else COMPLETED
        for phase in (s.ATTEMPT_PHASE_STARTED, s.ATTEMPT_PHASE_FINISHING):
            await self._report(message, phase, exit)
        self.running -= 1  # before the last report: the room is given away while its answer is on the way
        await self._report(message, s.ATTEMPT_PHASE_ENDED, exit)

    async def _report(self, message: dict[str, Any], phase: "s.AttemptPhase", exit: c.Exit) -> None:
        request = s.ReportAttemptRequest(**message, launcher_id=LAUNCHER, phase=phase, exit=exit)
        await self.client.call(self.client.launchers.ReportAttempt, request)


async def watch(client: Client) -> list[s.Event]:
    """Every event until all jobs have ended, over however many streams that takes."""
    events: list[s.Event] = []
    ended: set[str] = set()
    while True:
        cursor = events[-1].seq if events else 0
        try:
            async for event in client.users.Watch(s.WatchRequest(after_seq=cursor), wait_for_ready=True):
                events.append(event)
                if event.state in ENDS:
                    ended.add(event.object_id)
                if len(ended) == JOBS:
                    return events
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise


async def submit_all(client: Client) -> dict[str, set[str]]:
    """Job ids by key; a key is submitted again when its answer is lost."""
    ids: dict[str, set[str]] = {}
    for number in range(JOBS):
        text = document(f"job-{number}", retries={"limit": 1, "backoff": "10ms"})
        request = s.SubmitRequest(document=s.Document(text=text), idempotency_key=f"key-{number}")
        for _ in range(2):
            answer = await client.call(client.users.Submit, request)
            ids.setdefault(request.idempotency_key, set()).add(answer.job.id)
    return ids


@pytest.fixture
async def victim(tmp_path: Path, request: pytest.FixtureRequest, database_url: str) -> AsyncIterator[Victim]:
    victim = Victim(tmp_path, request.param, database_url)
    await victim.start()
    yield victim
    await victim.kill()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1], indirect=True)
async def test_killed_at_random_points_it_loses_nothing_and_starts_nothing_twice(victim: Victim) -> None:
    async with connect(f"127.0.0.1:{victim.port}", bearer_token(victim.home)) as channel:
        client = Client(channel, victim)
        machine = s.Machine(name="m0", total=c.Resources(cpu=CPUS, memory_bytes=64 << 30))
        pool = s.RegisterPoolRequest(pool="local", launcher_id=LAUNCHER, machines=[machine], lease_s=3600)
        await client.call(client.launchers.RegisterPool, pool)
        launcher, finished = Launcher(client, victim.home), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(launcher.run(finished))
            watching = tasks.create_task(watch(client))
            ids = await submit_all(client)
            events = await watching
            finished.set()
            await running
        jobs = (await client.call(client.users.ListJobs, s.ListJobsRequest(page_size=1000))).jobs

    assert victim.kills == KILLS
    assert all(len(same) == 1 for same in ids.values())
    assert {job.id for job in jobs} == {job_id for same in ids.values() for job_id in same}
    assert {job.state for job in jobs} == {s.JOB_STATE_SUCCEEDED}
    assert {job.attempt for job in jobs if int(job.name.split("-")[1]) % FAILS_FIRST} == {1}
    assert set(launcher.started.values()) == {1}
    assert launcher.most <= CPUS
    happened = Counter((event.object_id, event.type, event.attempt) for event in events if event.kind == "Job")
    assert set(happened.values()) == {1}
    assert [event.seq for event in events] == sorted({event.seq for event in events})
    by_type = Counter(event.type for event in events)
    attempts = sum(job.attempt for job in jobs)
    assert (by_type["Submitted"], by_type["Succeeded"], by_type["Requeued"]) == (JOBS, JOBS, JOBS // FAILS_FIRST)
    assert by_type["Admitted"] == by_type["Claimed"] == by_type["Running"] == by_type["Finalizing"] == attempts
