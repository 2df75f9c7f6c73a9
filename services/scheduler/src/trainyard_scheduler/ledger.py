"""The one way to change the scheduler's state.

A transition is a function of a `Transaction`: it changes records, notes events and messages, and says what the
in-memory index has to know. Everything is written together; only after the commit does the index learn of it, in commit
order. So the index never knows what the database does not, and a crash at any point loses nothing that was promised.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import sqlalchemy
from servicekit.clock import Clock
from servicekit.events import KEPT, AdminEvent, Subject, columns_of
from servicekit.outbox import Publisher
from servicekit.store import Store
from sqlalchemy import bindparam
from sqlmodel import Session

from trainyard_scheduler.domain.reasons import EventType
from trainyard_scheduler.index import Index
from trainyard_scheduler.tables import (
    ATTEMPT_CHANGES,
    ATTEMPTS,
    EVENTS,
    JOB_CHANGES,
    JOBS,
    NOT_OF_JOBS,
    OUTBOX,
    Attempt,
    Event,
    Job,
)
from trainyard_scheduler.watch import EventHub

T = TypeVar("T")
Effect = Callable[[Index], None]

SCHEDULER = "scheduler"
USER = "user"

_INSERT_JOB = sqlalchemy.insert(JOBS)
_INSERT_ATTEMPT = sqlalchemy.insert(ATTEMPTS)
_INSERT_EVENT = sqlalchemy.insert(EVENTS)
_NEWEST_FORGOTTEN = (
    sqlalchemy.select(EVENTS.c.seq).where(NOT_OF_JOBS).order_by(EVENTS.c.seq.desc()).limit(1).offset(bindparam("kept"))
)
_FORGET_OTHERS = sqlalchemy.delete(EVENTS).where(NOT_OF_JOBS, EVENTS.c.seq <= _NEWEST_FORGOTTEN.scalar_subquery())
_INSERT_MESSAGE = sqlalchemy.insert(OUTBOX)
_UPDATE_JOB = sqlalchemy.update(JOBS).where(JOBS.c.id == bindparam("key"))
_UPDATE_ATTEMPT = sqlalchemy.update(ATTEMPTS).where(ATTEMPTS.c.id == bindparam("key"))
_JOB_BY_ID = sqlalchemy.select(JOBS).where(JOBS.c.id == bindparam("key"))
_JOBS_BY_ID = sqlalchemy.select(JOBS).where(JOBS.c.id.in_(bindparam("keys", expanding=True)))
_ATTEMPTS_BY_ID = sqlalchemy.select(ATTEMPTS).where(ATTEMPTS.c.id.in_(bindparam("keys", expanding=True)))
_ATTEMPT_BY_ID = sqlalchemy.select(ATTEMPTS).where(ATTEMPTS.c.id == bindparam("key"))


class Transaction:
    """What one transition reads and writes. Records handed out are written back when they were passed to `changed`.

    Attributes:
        now_ns: UTC, for what is stored.
        past_ns: what stored times are compared with before anything is removed; see `Clock`.
    """

    def __init__(self, session: Session, clock: Clock, next_seq: int) -> None:
        self.session = session
        self.connection = session.connection()
        self.now_ns = clock.utc_ns()
        self.past_ns = clock.past_ns()
        self.next_seq = next_seq
        self.effects: list[Effect] = []
        self.events: list[Event] = []
        self.messages: list[dict[str, object]] = []
        self._other_events = False
        self._jobs: dict[str, Job] = {}
        self._attempts: dict[str, Attempt] = {}
        self._new_jobs: list[Job] = []
        self._new_attempts: list[Attempt] = []
        self._changed_jobs: dict[str, Job] = {}
        self._changed_attempts: dict[str, Attempt] = {}

    def job(self, job_id: str) -> Job | None:
        """The job, or None."""
        if job_id not in self._jobs:
            self._load_jobs([job_id])
        return self._jobs.get(job_id)

    def jobs(self, job_ids: Sequence[str]) -> list[Job]:
        """Those of the jobs that exist, in this order."""
        self._load_jobs([job_id for job_id in job_ids if job_id not in self._jobs])
        return [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]

    def attempt(self, attempt_id: str) -> Attempt | None:
        """The attempt, or None."""
        if attempt_id not in self._attempts:
            self._load_attempts([attempt_id])
        return self._attempts.get(attempt_id)

    def load(self, attempt_ids: Sequence[str]) -> None:
        """Reads attempts and their jobs at once, before they are asked for one by one."""
        self._load_attempts(attempt_ids)
        self._load_jobs([attempt.job_id for attempt in self._attempts.values()])

    def loaded_attempts(self) -> list[Attempt]:
        """The attempts read so far."""
        return list(self._attempts.values())

    def _load_jobs(self, job_ids: Sequence[str]) -> None:
        for row in self._rows(_JOB_BY_ID, _JOBS_BY_ID, job_ids):
            self._jobs[row.id] = Job.model_construct(**row._mapping)

    def _load_attempts(self, attempt_ids: Sequence[str]) -> None:
        for row in self._rows(_ATTEMPT_BY_ID, _ATTEMPTS_BY_ID, attempt_ids):
            self._attempts[row.id] = Attempt.model_construct(**row._mapping)

    def _rows(self, one: sqlalchemy.Select[Any], many: sqlalchemy.Select[Any], keys: Sequence[str]) -> Iterable[Any]:
        if len(keys) == 1:  # by far the most frequent, and cheaper than a list of one
            return self.connection.execute(one, {"key": keys[0]})
        return self.connection.execute(many, {"keys": list(keys)}) if keys else ()

    def add_job(self, job: Job) -> None:
        self._jobs[job.id] = job
        self._new_jobs.append(job)

    def add_attempt(self, attempt: Attempt) -> None:
        self._attempts[attempt.id] = attempt
        self._new_attempts.append(attempt)

    def changed(self, job: Job, attempt: Attempt | None = None) -> None:
        """Marks records to be written."""
        job.updated_ns = self.now_ns
        self._changed_jobs[job.id] = job
        if attempt is not None:
            self._changed_attempts[attempt.id] = attempt

    def event(self, job: Job, kind: EventType, actor: str, reason: str = "", message: str = "") -> None:
        """Notes what happened to a job, with its state after it."""
        event = Event.model_construct(
            seq=self._take_seq(),
            workspace=job.workspace,
            kind="Job",
            object_id=job.id,
            object_name=job.name,
            time_ns=self.now_ns,
            actor=actor,
            type=str(kind),
            reason=reason,
            message=message,
            state=job.state,
            attempt=job.attempt,
        )
        job.event_seq = event.seq
        self.events.append(event)

    def pool_event(self, pool: str, kind: EventType, actor: str, message: str) -> None:
        """Notes what happened to a pool."""
        self.other_event(actor, kind, Subject("Pool", pool, pool), message)

    def other_event(self, actor: str, kind: EventType | AdminEvent, about: Subject, message: str = "") -> None:
        """Notes what happened to something that is no job. Of these events the newest are kept."""
        columns = columns_of(actor, kind, about, message)
        self.events.append(Event.model_construct(**{**columns, "seq": self._take_seq(), "time_ns": self.now_ns}))
        self._other_events = True

    def send(self, queue: str, task: str, **kwargs: object) -> None:
        """A message that leaves after the commit."""
        self.messages.append({"queue": queue, "task": task, "kwargs": json.dumps(kwargs), "created_ns": self.now_ns})

    def after_commit(self, effect: Effect) -> None:
        """What the index has to learn."""
        self.effects.append(effect)

    def flush(self) -> None:
        """Writes everything."""
        self._insert(_INSERT_JOB, [job.__dict__ for job in self._new_jobs])
        self._insert(_INSERT_ATTEMPT, [attempt.__dict__ for attempt in self._new_attempts])
        self._insert(_UPDATE_JOB, _changes(self._changed_jobs.values(), JOB_CHANGES))
        self._insert(_UPDATE_ATTEMPT, _changes(self._changed_attempts.values(), ATTEMPT_CHANGES))
        self._insert(_INSERT_EVENT, [event.__dict__ for event in self.events])
        if self._other_events:
            self.connection.execute(_FORGET_OTHERS, {"kept": KEPT})
        self._insert(_INSERT_MESSAGE, self.messages)

    def _insert(self, statement: sqlalchemy.Insert | sqlalchemy.Update, rows: list[dict[str, object]]) -> None:
        if rows:
            self.connection.execute(statement, rows)

    def _take_seq(self) -> int:
        self.next_seq += 1
        return self.next_seq - 1


def _changes(records: Iterable[Job | Attempt], columns: tuple[str, ...]) -> list[dict[str, object]]:
    changes = []
    for record in records:
        values = record.__dict__
        changes.append({"key": values["id"], **{name: values[name] for name in columns}})
    return changes


class Ledger:
    """Runs transitions and tells the index, the watchers and the outbox what was committed."""

    def __init__(self, store: Store, index: Index, hub: EventHub, publisher: Publisher, clock: Clock) -> None:
        self._store = store
        self._index = index
        self._hub = hub
        self._publisher = publisher
        self._clock = clock
        self._next_seq = 1
        self._running: set[asyncio.Task[object]] = set()

    async def open(self) -> None:
        """Finds where event numbers go on. The newest event is never deleted, so no number is given twice."""
        newest = await self._store.read(
            lambda s: s.connection().scalar(sqlalchemy.select(sqlalchemy.func.max(EVENTS.c.seq)))
        )
        self._next_seq = (newest or 0) + 1
        self._hub.open(newest or 0)

    async def close(self) -> None:
        """Waits for the transitions that run: to be called once the store is closed, which answers them all."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def write(self, transition: Callable[[Transaction], T]) -> T:
        """Runs a transition; returns its value when it is committed and the index knows.

        A caller that goes away does not take the index's knowledge with it.

        Raises:
            ServiceError: the transition refused, or the store could not take it; nothing of it is stored.
        """
        task = asyncio.create_task(self._write(transition))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _write(self, transition: Callable[[Transaction], T]) -> T:
        value, transaction = await self._store.write(lambda session: self._transact(session, transition))
        for effect in transaction.effects:
            effect(self._index)
        if transaction.events:
            self._hub.publish(transaction.events)
        if transaction.messages:
            self._publisher.wake()
        return value

    def _transact(self, session: Session, transition: Callable[[Transaction], T]) -> tuple[T, Transaction]:
        # On the writer's thread, which alone gives event numbers; one that is undone leaves a hole.
        transaction = Transaction(session, self._clock, self._next_seq)
        value = transition(transaction)
        transaction.flush()
        self._next_seq = transaction.next_seq
        return value, transaction
