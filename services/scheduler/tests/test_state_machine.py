"""Any order of what users, launchers and time may do, against a real database, with restarts in between."""

import asyncio
import functools
import tempfile
from typing import TypeVar

import pytest
import sqlalchemy
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from prometheus_client import Histogram
from servicekit.celery import celery_app
from servicekit.errors import FailedPrecondition
from servicekit.outbox import Publisher
from servicekit.store import Store
from trainyard_protos.v1 import common_pb2 as c
from trainyard_protos.v1 import scheduler_pb2 as s
from trainyard_scheduler import queries
from trainyard_scheduler.app import MIGRATIONS
from trainyard_scheduler.documents import resolve
from trainyard_scheduler.domain.admission import NOTHING, Amount
from trainyard_scheduler.domain.states import JobState
from trainyard_scheduler.duties import Admitter, TimerDuties
from trainyard_scheduler.index import Index
from trainyard_scheduler.ledger import Ledger
from trainyard_scheduler.offers import read_offer
from trainyard_scheduler.rebuild import rebuild
from trainyard_scheduler.settings import Settings
from trainyard_scheduler.tables import ATTEMPTS, EVENTS, JOBS, Job, OutboxTable
from trainyard_scheduler.transitions import pools, steer
from trainyard_scheduler.transitions.claim import claim
from trainyard_scheduler.transitions.report import report
from trainyard_scheduler.transitions.submit import Submission, submit
from trainyard_scheduler.watch import EventHub

from services.scheduler.tests.yard import COMPLETED, LAUNCHER, Clock, document, exit_of

T = TypeVar("T")

MACHINES = {"m0": Amount(4000, 8 << 30, 0), "m1": Amount(2000, 8 << 30, 0)}
PHASES = st.sampled_from(
    [s.ATTEMPT_PHASE_STARTED, s.ATTEMPT_PHASE_FINISHING, s.ATTEMPT_PHASE_PUBLISHING, s.ATTEMPT_PHASE_ENDED]
)
EXITS = st.sampled_from([COMPLETED, exit_of(exit_code=1), exit_of("CodeUnavailable"), exit_of("Completed")])


class SchedulerMachine(RuleBasedStateMachine):
    """The scheduler without its tasks: admission and timers run as steps, so that every order can be tried."""

    jobs: Bundle[str] = Bundle("jobs")

    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.settings = Settings()
        self.fences: dict[str, int] = {}
        self.runner.run(self._open())
        self._register()

    def _register(self) -> None:
        machines = [
            s.Machine(
                name=name,
                total=c.Resources(cpu=size.cpu_milli / 1000, memory_bytes=size.memory_bytes, gpu=size.gpu),
            )
            for name, size in MACHINES.items()
        ]
        request = s.RegisterPoolRequest(pool="p", launcher_id=LAUNCHER, machines=machines, lease_s=1e9)
        self._write(functools.partial(pools.register, request=request, offer=read_offer(request)))

    async def _open(self) -> None:
        self.store = Store(f"sqlite:///{self.folder.name}/s.db", migrations=MIGRATIONS, name="scheduler")
        await self.store.open()
        self.index = Index(self.clock)
        publisher = Publisher(self.store, OutboxTable, celery_app())
        self.ledger = Ledger(self.store, self.index, EventHub(), publisher, self.clock)
        await self.ledger.open()
        await self.store.read(lambda session: rebuild(session, self.index))
        self.duties = TimerDuties(self.index, self.ledger, self.settings)
        waited = Histogram("waited", "", registry=None)
        self.admitter = Admitter(self.index, self.ledger, self.settings, waited)

    def _write(self, transition: "functools.partial[T]") -> T:
        return self.runner.run(self.ledger.write(transition))

    def _job(self, job_id: str) -> Job:
        return self.runner.run(self.store.read(lambda session: queries.find_job(session, job_id)))

    @rule(
        target=jobs,
        priority=st.integers(0, 2),
        nodes=st.integers(1, 3),
        cpu=st.integers(1, 5),
        limit=st.integers(0, 2),
        backoff=st.sampled_from(["0s", "10s"]),
        deadline=st.sampled_from([{}, {"deadline": "30s"}]),
    )
    def submit(self, priority: int, nodes: int, cpu: int, limit: int, backoff: str, deadline: dict[str, str]) -> str:
        text = document(
            priority=priority,
            nodes=nodes,
            resources={"cpu": cpu, "memory": "1Gi"},
            retries={"limit": limit, "backoff": backoff},
            **deadline,
        )
        submission = Submission("default", "", "", "", resolve(text, "", "", 1 << 20))
        return self._write(functools.partial(submit, submissions=[submission]))[0].job.id

    @rule()
    def admit(self) -> None:
        self.runner.run(self.admitter._admit_all())

    @rule(job_id=jobs, launcher=st.sampled_from([LAUNCHER, "another"]))
    def claim(self, job_id: str, launcher: str) -> None:
        job = self._job(job_id)
        if job.attempt:
            self._write(functools.partial(claim, attempt_id=job.attempt_id, fence=job.attempt, launcher_id=launcher))

    @rule(job_id=jobs, phase=PHASES, exit=EXITS, late=st.booleans())
    def report(self, job_id: str, phase: "s.AttemptPhase", exit: "s.common_pb2.Exit", late: bool) -> None:
        job = self._job(job_id)
        request = s.ReportAttemptRequest(
            attempt_id=job.attempt_id,
            fence=job.attempt - late,
            launcher_id=self._holder(job.attempt_id),
            phase=phase,
            exit=exit,
        )
        answer = self._write(functools.partial(report, request=request, finalize_timeout_s=20))
        after = self._job(job_id)
        if late or answer.stale:
            assert after == job

    def _holder(self, attempt_id: str) -> str:
        query = sqlalchemy.select(ATTEMPTS.c.launcher_id).where(ATTEMPTS.c.id == attempt_id)
        return self.runner.run(self.store.read(lambda session: session.connection().scalar(query))) or LAUNCHER

    @rule(job_id=jobs)
    def cancel(self, job_id: str) -> None:
        before = JobState(self._job(job_id).state)
        try:
            self._write(functools.partial(steer.cancel, job_id=job_id, message=""))
        except FailedPrecondition:
            publishing = sqlalchemy.select(ATTEMPTS.c.id).where(
                ATTEMPTS.c.job_id == job_id, ATTEMPTS.c.state == "publishing"
            )
            assert before in (JobState.SUCCEEDED, JobState.FAILED) or self._rows(publishing)
        else:
            assert self._job(job_id).state in (JobState.CANCELLED, JobState.STOPPING)

    @rule(job_id=jobs)
    def retry(self, job_id: str) -> None:
        before = JobState(self._job(job_id).state)
        try:
            self._write(functools.partial(steer.retry, job_id=job_id))
        except FailedPrecondition:
            assert before not in (JobState.FAILED, JobState.CANCELLED)
        else:
            assert self._job(job_id).state == JobState.QUEUED

    @rule(seconds=st.sampled_from([1, 10, 60]))
    def pass_time(self, seconds: int) -> None:
        self.clock.now_ns += seconds * 10**9
        handlers = self.duties.handlers()
        for kind, keys in self.index.timers.pop_due().items():
            self.runner.run(handlers[kind](keys))

    @rule()
    def lose_the_pool(self) -> None:
        self._write(functools.partial(pools.lose, name="p", lease_s=1.0))
        self._register()

    @rule()
    def restart(self) -> None:
        self.runner.run(self.store.close())
        self.runner.run(self._open())

    @invariant()
    def room_is_what_living_attempts_leave(self) -> None:
        held = dict.fromkeys(MACHINES, NOTHING)
        for row in self._rows(sqlalchemy.select(ATTEMPTS).where(ATTEMPTS.c.state != "ended")):
            holding = self.index._holding[row.id]
            for machine in holding.machines:
                held[machine] = held[machine].plus(holding.node)
        pool = self.index.pools["p"]
        free = pool.room.free
        assert {name: machine.total.minus(held[name]) for name, machine in pool.offer.machines.items()} == free
        assert all(NOTHING.fits_in(size) for size in free.values())

    @invariant()
    def the_index_knows_what_the_database_knows(self) -> None:
        jobs = self._rows(sqlalchemy.select(JOBS))
        queued = {row.id for row in jobs if row.state == JobState.QUEUED}
        assert set(self.index._waiting) == queued
        for state in JobState:
            assert self.index.states[state] == sum(row.state == state for row in jobs)
        ready = [job_id for _, job_id in self.index._ready]
        assert len(set(ready)) == len(ready)
        assert not set(ready) & self.index._aside.keys()

    @invariant()
    def a_job_has_at_most_one_living_attempt_and_its_fence_only_grows(self) -> None:
        living = self._rows(sqlalchemy.select(ATTEMPTS.c.job_id).where(ATTEMPTS.c.state != "ended"))
        assert len({row.job_id for row in living}) == len(living)
        for row in self._rows(sqlalchemy.select(JOBS)):
            assert row.attempt >= self.fences.get(row.id, 0)
            self.fences[row.id] = row.attempt
            active = row.state not in (JobState.QUEUED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
            assert active == (row.id in {entry.job_id for entry in living})

    @invariant()
    def the_newest_event_of_a_job_tells_its_state(self) -> None:
        newest = sqlalchemy.select(EVENTS.c.object_id, EVENTS.c.state, sqlalchemy.func.max(EVENTS.c.seq))
        told = {row[0]: (row[1], row[2]) for row in self._rows(newest.group_by(EVENTS.c.object_id))}
        for row in self._rows(sqlalchemy.select(JOBS)):
            assert told[row.id] == (row.state, row.event_seq)

    def _rows(self, query: "sqlalchemy.Select[tuple[object, ...]]") -> "list[sqlalchemy.Row[tuple[object, ...]]]":
        return self.runner.run(self.store.read(lambda session: list(session.connection().execute(query))))

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.store.close())
            self.runner.close()
            self.folder.cleanup()


TestScheduler = pytest.mark.slow(SchedulerMachine.TestCase)
TestScheduler.settings = settings(
    max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
