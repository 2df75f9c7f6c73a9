"""What a user does to a job: cancel, retry and delete."""

from __future__ import annotations

from servicekit.errors import FailedPrecondition, NotFound
from servicekit.events import AdminEvent, Subject

from trainyard_scheduler import queries
from trainyard_scheduler.domain.reasons import EventType, StopReason
from trainyard_scheduler.domain.states import ENDED, AttemptState, JobState
from trainyard_scheduler.ledger import USER, Transaction
from trainyard_scheduler.tables import Job
from trainyard_scheduler.transitions.expire import remove
from trainyard_scheduler.transitions.steps import ask_to_stop, close_attempt, end_job, enqueue


def cancel(tx: Transaction, job_id: str, message: str) -> Job:
    """Cancels a job that has not ended; one that is cancelled stays so.

    Raises:
        NotFound: it was removed meanwhile.
        FailedPrecondition: it has succeeded or failed, or is publishing what it made.
    """
    job = _existing(tx, job_id)
    message = message or "cancelled by the user"
    if job.state == JobState.CANCELLED:
        return job
    if job.state in (JobState.SUCCEEDED, JobState.FAILED):
        raise FailedPrecondition(
            f"job '{job.name}' ({job.id}) has ended already: {JobState(job.state).name.lower()}", reason="AlreadyEnded"
        )
    attempt = tx.attempt(job.attempt_id) if job.state != JobState.QUEUED else None
    if attempt is not None and attempt.state == AttemptState.PUBLISHING:
        raise FailedPrecondition(
            f"job '{job.name}' ({job.id}) has succeeded already: its outputs are being published", reason="AlreadyEnded"
        )
    if attempt is not None and attempt.state != AttemptState.CREATED:
        if attempt.stop_reason != StopReason.CANCELLED:
            ask_to_stop(tx, job, attempt, StopReason.CANCELLED, USER, message)
        return job
    if attempt is not None:
        # Nobody has it, and nobody will: a claim finds it over.
        close_attempt(tx, job, attempt, tx.now_ns, StopReason.CANCELLED)
    end_job(tx, job, JobState.CANCELLED, USER, StopReason.CANCELLED, message)
    return job


def retry(tx: Transaction, job_id: str) -> Job:
    """Queues a failed or cancelled job again, with a fresh budget and a fresh deadline.

    Raises:
        NotFound: it was removed meanwhile.
        FailedPrecondition: it has succeeded, or has not ended.
    """
    job = _existing(tx, job_id)
    if job.state not in (JobState.FAILED, JobState.CANCELLED):
        ended = job.state == JobState.SUCCEEDED
        raise FailedPrecondition(
            f"job '{job.name}' ({job.id}) is {JobState(job.state).name.lower()}: "
            "only failed and cancelled jobs can be retried",
            reason="AlreadySucceeded" if ended else "NotEnded",
            hint="submit it again to run it anew" if ended else "cancel it first",
        )
    job.retries_used = job.free_retries_used = 0
    job.deadline_ns = job.ended_ns = job.expires_ns = 0
    job.reason = job.message = ""
    enqueue(tx, job)
    tx.changed(job)
    tx.event(job, EventType.RETRIED_BY_USER, USER)
    return job


def delete(tx: Transaction, job_id: str, actor: str) -> None:
    """Removes a job that has ended, and records who did. One that is gone stays so.

    Versions that jobs which have not ended name as inputs stay. They are read in the same transaction, so that a job
    that is submitted meanwhile counts.

    Raises:
        FailedPrecondition: it has not ended.
    """
    job = tx.job(job_id)
    if job is None:
        return
    require_ended(job)
    remove(tx, [job], queries.used_artifacts(tx.connection, job.workspace))
    # Not an event of the job: those go with it.
    what = f"job {job.name}#{job.number} ({job.id}), {JobState(job.state).name.lower()} -> deleted"
    tx.other_event(actor, AdminEvent.JOB_DELETED, Subject("Service", job.name, job.id, job.workspace), what)


def require_ended(job: Job) -> None:
    """Raises FailedPrecondition when a job has not ended."""
    if job.state not in ENDED:
        raise FailedPrecondition(
            f"job {job.name}#{job.number} ({job.id}) is {JobState(job.state).name.lower()}: only jobs that have ended "
            "can be removed",
            reason="NotEnded",
            hint=f"cancel it first: yard cancel {job.name}#{job.number}",
        )


def _existing(tx: Transaction, job_id: str) -> Job:
    job = tx.job(job_id)
    if job is None:
        raise NotFound(f"job {job_id} was removed after its TTL", reason="JobNotFound")
    return job
