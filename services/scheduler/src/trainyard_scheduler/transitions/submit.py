"""A job comes into being."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy
from servicekit.ids import new_id
from servicekit.store import upsert

from trainyard_scheduler.documents import Resolved
from trainyard_scheduler.domain.reasons import EventType
from trainyard_scheduler.domain.states import JobState
from trainyard_scheduler.index import Index
from trainyard_scheduler.ledger import USER, Transaction
from trainyard_scheduler.tables import DOCUMENTS, JOB_NUMBERS, JOBS, LABELS, Job

_INSERT_DOCUMENT = sqlalchemy.insert(DOCUMENTS)
_INSERT_LABEL = sqlalchemy.insert(LABELS)


class Submission(NamedTuple):
    """A checked request."""

    workspace: str
    idempotency_key: str
    owner_kind: str
    owner_id: str
    resolved: Resolved
    secrets_checked: bool = False


class Submitted(NamedTuple):
    """The job of a request; `created` is false when its key was known."""

    job: Job
    created: bool


def submit(tx: Transaction, submissions: Sequence[Submission]) -> list[Submitted]:
    """Stores new jobs; the job of a key that is known is returned as it is, whatever the document says now."""
    known = _known(tx, submissions)
    numbers = _Numbers(tx, submissions)
    results: list[Submitted] = []
    documents: list[dict[str, str]] = []
    labels: list[dict[str, str]] = []
    for submission in submissions:
        key = (submission.workspace, submission.idempotency_key)
        job = known.get(key) if submission.idempotency_key else None
        if job is not None:
            results.append(Submitted(job, False))
            continue
        job = _create(tx, submission, numbers)
        documents.append({"job_id": job.id, "spec": submission.resolved.spec})
        labels.extend({"job_id": job.id, "key": k, "value": v} for k, v in submission.resolved.labels)
        known[key] = job
        results.append(Submitted(job, True))
    if documents:
        tx.connection.execute(_INSERT_DOCUMENT, documents)
        numbers.store()
    if labels:
        tx.connection.execute(_INSERT_LABEL, labels)
    return results


def _known(tx: Transaction, submissions: Sequence[Submission]) -> dict[tuple[str, str], Job]:
    keys = {submission.idempotency_key for submission in submissions if submission.idempotency_key}
    if not keys:
        return {}
    rows = tx.connection.execute(sqlalchemy.select(JOBS).where(JOBS.c.idempotency_key.in_(keys)))
    jobs = [Job.model_construct(**row._mapping) for row in rows]
    return {(job.workspace, job.idempotency_key): job for job in jobs}


class _Numbers:
    """Numbers the jobs of each name. The one writer of the database gives each number once."""

    def __init__(self, tx: Transaction, submissions: Sequence[Submission]) -> None:
        self._tx = tx
        names = {submission.resolved.name for submission in submissions}
        rows = tx.connection.execute(sqlalchemy.select(JOB_NUMBERS).where(JOB_NUMBERS.c.name.in_(names)))
        self._newest: dict[tuple[str, str], int] = {(row.workspace, row.name): row.newest for row in rows}
        self._given: set[tuple[str, str]] = set()

    def give(self, workspace: str, name: str) -> int:
        """Returns the number of a new job."""
        key = (workspace, name)
        self._given.add(key)
        number = self._newest[key] = self._newest.get(key, 0) + 1
        return number

    def store(self) -> None:
        """Writes what was given."""
        rows = [{"workspace": key[0], "name": key[1], "newest": self._newest[key]} for key in self._given]
        upsert(self._tx.session, JOB_NUMBERS, rows, ["workspace", "name"])


def _create(tx: Transaction, submission: Submission, numbers: _Numbers) -> Job:
    resolved = submission.resolved
    job_id = new_id()
    job = Job.model_construct(
        id=job_id,
        workspace=submission.workspace,
        name=resolved.name,
        number=numbers.give(submission.workspace, resolved.name),
        owner_kind=submission.owner_kind,
        owner_id=submission.owner_id,
        queue=resolved.queue,
        priority=resolved.priority,
        labels=json.dumps(dict(resolved.labels)),
        idempotency_key=submission.idempotency_key or job_id,
        nodes=resolved.nodes,
        workers_per_node=resolved.workers_per_node,
        cpu_milli=resolved.per_worker.cpu_milli,
        memory_bytes=resolved.per_worker.memory_bytes,
        gpu=resolved.per_worker.gpu,
        policy=resolved.policy,
        secrets_checked=int(submission.secrets_checked),
        created_ns=tx.now_ns,
        updated_ns=tx.now_ns,
        state=int(JobState.QUEUED),
    )
    tx.add_job(job)
    tx.event(job, EventType.SUBMITTED, USER)
    _announce(tx, job_id, resolved)
    return job


def _announce(tx: Transaction, job_id: str, resolved: Resolved) -> None:
    def effect(index: Index) -> None:
        index.moved(None, JobState.QUEUED)
        index.enqueue(job_id, resolved.priority, resolved.demand, queue=resolved.queue)

    tx.after_commit(effect)
