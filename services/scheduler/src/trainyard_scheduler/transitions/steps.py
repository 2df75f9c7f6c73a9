"""Steps that several transitions share: moving a job, giving its room back, queueing it again, ending it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from servicekit.messages import STOP, stop_queue

from trainyard_scheduler.domain.admission import Amount, Demand, kind_of
from trainyard_scheduler.domain.reasons import EventType, StopReason
from trainyard_scheduler.domain.states import AttemptState, JobState, check_move
from trainyard_scheduler.index import Index
from trainyard_scheduler.ledger import Transaction
from trainyard_scheduler.policy import read_policy
from trainyard_scheduler.tables import Attempt, Job
from trainyard_scheduler.timers import TimerKind

NS_PER_S = 1_000_000_000

_END_EVENTS = {
    JobState.SUCCEEDED: EventType.SUCCEEDED,
    JobState.FAILED: EventType.FAILED,
    JobState.CANCELLED: EventType.CANCELLED,
}


def demand_of(job: Job) -> Demand:
    """What the job needs at once."""
    worker = Amount(job.cpu_milli, job.memory_bytes, job.gpu)
    return Demand(job.nodes, worker.times(job.workers_per_node), read_policy(job.policy).wishes)


def named(machines: Iterable[str]) -> str:
    """Machines in words, each once."""
    names = dict.fromkeys(machines)
    kinds = Counter(kind for name in names if (kind := kind_of(name)))
    new = (f"{count} new machine{'s' if count > 1 else ''} of kind '{kind}'" for kind, count in kinds.items())
    return ", ".join([*(name for name in names if not kind_of(name)), *new])


def move(tx: Transaction, job: Job, state: JobState) -> None:
    """Changes the job's state and counts it."""
    old = JobState(job.state)
    job.state = int(check_move(old, state))
    tx.after_commit(lambda index: index.moved(old, state))


def enqueue(tx: Transaction, job: Job, not_before_ns: int = 0) -> None:
    """Puts the job in the queue."""
    move(tx, job, JobState.QUEUED)
    job.not_before_ns = not_before_ns
    job_id, priority, demand, queue = job.id, job.priority, demand_of(job), job.queue
    tx.after_commit(lambda index: index.enqueue(job_id, priority, demand, not_before_ns, queue=queue))


def start_deadline(tx: Transaction, job: Job) -> None:
    """Counts the job's deadline from now on, unless it is counted or there is none."""
    deadline_s = read_policy(job.policy).deadline_s
    if job.deadline_ns or not deadline_s:
        return
    job_id, due_ns = job.id, tx.now_ns + int(deadline_s * NS_PER_S)
    job.deadline_ns = due_ns
    tx.after_commit(lambda index: index.timers.at(TimerKind.DEADLINE, job_id, due_ns))


def reset_deadline(tx: Transaction, job: Job) -> None:
    """Counts the job's deadline no longer: nothing of it has run."""
    job_id, job.deadline_ns = job.id, 0
    tx.after_commit(lambda index: index.timers.cancel(TimerKind.DEADLINE, job_id))


def close_attempt(tx: Transaction, job: Job, attempt: Attempt, ended_ns: int, reason: str) -> None:
    """The attempt is over; nothing of it counts any more."""
    attempt.state = AttemptState.ENDED
    attempt.ended_ns = ended_ns
    attempt_id, pool, ran = attempt.id, attempt.pool, attempt.started_ns > 0
    tx.changed(job, attempt)

    def effect(index: Index) -> None:
        index.release(attempt_id)
        index.tally.attempt_ended(pool, reason, ran)

    tx.after_commit(effect)


def end_job(tx: Transaction, job: Job, state: JobState, actor: str, reason: str, message: str) -> None:
    """The job is over, until a user retries it."""
    move(tx, job, state)
    job.reason, job.message = reason, message
    job.ended_ns = tx.now_ns
    job.not_before_ns = 0
    job_id, expires_ns = job.id, 0
    ttl_s = read_policy(job.policy).ttl_s
    if ttl_s is not None:
        expires_ns = job.expires_ns = tx.now_ns + int(ttl_s * NS_PER_S)

    def effect(index: Index) -> None:
        index.dequeue(job_id)
        index.forget(job_id)
        index.tally.jobs[state] += 1
        index.timers.cancel(TimerKind.DEADLINE, job_id)
        if expires_ns:
            index.expire_at(expires_ns)

    tx.after_commit(effect)
    tx.changed(job)
    tx.event(job, _END_EVENTS[state], actor, reason, message)


def ask_to_stop(tx: Transaction, job: Job, attempt: Attempt, why: StopReason, actor: str, message: str) -> None:
    """Tells the launcher to stop an attempt it has; the job ends when the launcher reports the end."""
    if job.state != JobState.STOPPING:
        move(tx, job, JobState.STOPPING)
    attempt.stop_reason = why
    attempt.state = AttemptState.STOPPING
    job.reason, job.message = str(why), message
    attempt_id = attempt.id
    tx.after_commit(lambda index: index.timers.cancel(TimerKind.FINALIZE, attempt_id))
    tx.changed(job, attempt)
    tx.event(job, EventType.STOPPING, actor, str(why), message)
    send_stop(tx, attempt)


def send_stop(tx: Transaction, attempt: Attempt) -> None:
    """A wake-up for the launcher of the attempt."""
    tx.send(stop_queue(attempt.pool), STOP, attempt_id=attempt.id, fence=attempt.number)
