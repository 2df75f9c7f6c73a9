"""What time does to jobs: deadlines, attempts nobody claimed, outputs that take too long, removal after the TTL."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence

import sqlalchemy
from trainyard_protos.v1 import common_pb2

from trainyard_scheduler.domain.admission import kind_of
from trainyard_scheduler.domain.reasons import ExitReason, StopReason
from trainyard_scheduler.domain.states import AttemptState, JobState
from trainyard_scheduler.index import Index
from trainyard_scheduler.ledger import SCHEDULER, Transaction
from trainyard_scheduler.tables import ATTEMPTS, DOCUMENTS, EVENTS, JOB_NUMBERS, JOBS, LABELS, Job
from trainyard_scheduler.transitions.admit import announce
from trainyard_scheduler.transitions.finish import finish
from trainyard_scheduler.transitions.pools import block
from trainyard_scheduler.transitions.steps import NS_PER_S, ask_to_stop, close_attempt, end_job, send_stop
from trainyard_scheduler.transitions.tombstones import bury

_STOPPABLE = (JobState.STARTING, JobState.RUNNING)


def pass_deadline(tx: Transaction, job_id: str, due_ns: int) -> None:
    """Stops a job that is past its deadline. One whose workers ended in time may still store what they made.

    Args:
        due_ns: the deadline that has passed; nothing happens when the job has another one by now.
    """
    job = tx.job(job_id)
    if job is None or job.deadline_ns != due_ns:
        return
    message = "was not done at its deadline (spec.deadline)"
    attempt = tx.attempt(job.attempt_id) if job.state in _STOPPABLE else None
    if attempt is not None and attempt.state != AttemptState.CREATED:
        ask_to_stop(tx, job, attempt, StopReason.DEADLINE_EXCEEDED, SCHEDULER, message)
        return
    if attempt is not None:
        close_attempt(tx, job, attempt, tx.now_ns, ExitReason.DEADLINE_EXCEEDED)
    if attempt is not None or job.state == JobState.QUEUED:
        end_job(tx, job, JobState.FAILED, SCHEDULER, ExitReason.DEADLINE_EXCEEDED, message)


def give_up_storing(tx: Transaction, attempt_id: str, due_ns: int) -> None:
    """Fails an attempt whose outputs, logs or points were not stored in time, and has its remains stopped.

    Args:
        due_ns: the time that has passed; nothing happens when the attempt has another one by now.
    """
    attempt = tx.attempt(attempt_id)
    if attempt is None or attempt.state != AttemptState.FINALIZING or attempt.finalize_by_ns != due_ns:
        return
    job = tx.job(attempt.job_id)
    if job is None:
        return
    exit = common_pb2.Exit.FromString(attempt.exit)
    if exit.reason == ExitReason.COMPLETED:
        exit.reason = ExitReason.OUTPUTS_NOT_STORED
        exit.message = "outputs, logs or points were not stored in time after the workers ended"
    exit.acknowledged = False
    send_stop(tx, attempt)
    finish(tx, job, attempt, exit, SCHEDULER, tx.now_ns)


_NO_JOB_OF_THE_NAME = ~sqlalchemy.exists().where(
    JOBS.c.workspace == JOB_NUMBERS.c.workspace, JOBS.c.name == JOB_NUMBERS.c.name
)


def give_up_waiting(tx: Transaction, attempt_id: str, block_s: float) -> None:
    """Puts a job back in the queue whose machines were not there in time, and tries their kinds no more for a while."""
    attempt = tx.attempt(attempt_id)
    if attempt is None or attempt.state not in (AttemptState.CREATED, AttemptState.CLAIMED):
        return
    job = tx.job(attempt.job_id)
    kinds = Counter(kind for name in json.loads(attempt.machines) if (kind := kind_of(name)))
    if job is None or not kinds:
        return
    waited_s = (tx.now_ns - attempt.created_ns) / NS_PER_S
    lacking = " and ".join(
        f"{count} of {job.nodes} nodes had no machine of kind '{kind}'" for kind, count in kinds.items()
    )
    message = f"{lacking} after {waited_s:.0f} s; no job waits for one in the next {block_s:.0f} s"
    block(tx, attempt.pool, kinds, tx.now_ns + int(block_s * NS_PER_S))
    if attempt.state == AttemptState.CLAIMED:
        send_stop(tx, attempt)
    exit = common_pb2.Exit(reason=ExitReason.UNSCHEDULABLE, message=message, acknowledged=True)
    finish(tx, job, attempt, exit, SCHEDULER, tx.now_ns)


def announce_again(tx: Transaction, attempt_ids: Sequence[str]) -> None:
    """Sends the messages of attempts that nobody has claimed once more."""
    for attempt_id in attempt_ids:
        attempt = tx.attempt(attempt_id)
        if attempt is not None and attempt.state == AttemptState.CREATED:
            announce(tx, attempt)


def remove_expired(tx: Transaction, limit: int) -> None:
    """Removes jobs whose TTL is over, the oldest first; looks again when the next one is due."""
    due = (JOBS.c.expires_ns > 0) & (JOBS.c.expires_ns <= tx.past_ns)
    rows = tx.connection.execute(sqlalchemy.select(JOBS).where(due).order_by(JOBS.c.expires_ns).limit(limit))
    jobs = [Job.model_construct(**row._mapping) for row in rows]
    if jobs:
        remove(tx, jobs)
    next_ns = tx.connection.scalar(
        sqlalchemy.select(sqlalchemy.func.min(JOBS.c.expires_ns)).where(JOBS.c.expires_ns > 0)
    )
    if next_ns:
        tx.after_commit(lambda index: index.expire_at(next_ns))


def remove(tx: Transaction, jobs: Sequence[Job], used: Sequence[str] | None = None) -> None:
    """Removes jobs that have ended. What they left elsewhere is removed by launchers, who find it by its tombstones.

    Args:
        used: removes their checkpoints too, except versions that these references name; None leaves all artifacts.
    """
    ids = [job.id for job in jobs]
    bury(tx, {job.id: job.workspace for job in jobs}, used)
    newest = sqlalchemy.select(sqlalchemy.func.max(EVENTS.c.seq)).scalar_subquery()
    for statement in (
        sqlalchemy.delete(ATTEMPTS).where(ATTEMPTS.c.job_id.in_(ids)),
        sqlalchemy.delete(DOCUMENTS).where(DOCUMENTS.c.job_id.in_(ids)),
        sqlalchemy.delete(LABELS).where(LABELS.c.job_id.in_(ids)),
        # The newest event stays: numbers go on from it after a restart.
        sqlalchemy.delete(EVENTS).where(EVENTS.c.object_id.in_(ids), EVENTS.c.seq < newest),
        sqlalchemy.delete(JOBS).where(JOBS.c.id.in_(ids)),
        sqlalchemy.delete(JOB_NUMBERS).where(JOB_NUMBERS.c.name.in_({job.name for job in jobs}), _NO_JOB_OF_THE_NAME),
    ):
        tx.connection.execute(statement)
    for job in jobs:
        tx.after_commit(functools.partial(_forget, state=JobState(job.state)))


def _forget(index: Index, state: JobState) -> None:
    index.moved(state, None)
