"""A launcher takes an attempt. Only one ever does: a doubled, late or foreign claim is told STALE."""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy
from sqlalchemy import bindparam

from trainyard_scheduler.domain.reasons import EventType
from trainyard_scheduler.domain.states import AttemptState
from trainyard_scheduler.index import Index
from trainyard_scheduler.ledger import Transaction
from trainyard_scheduler.tables import DOCUMENTS, Attempt, Job
from trainyard_scheduler.timers import TimerKind

_SPEC = sqlalchemy.select(DOCUMENTS.c.spec).where(DOCUMENTS.c.job_id == bindparam("key"))


class Claimed(NamedTuple):
    """What the launcher gets; `stale` says why it gets nothing."""

    stale: str
    job: Job | None = None
    attempt: Attempt | None = None
    spec: str = ""


def claim(tx: Transaction, attempt_id: str, fence: int, launcher_id: str) -> Claimed:
    """Gives the attempt to this launcher; again to the same one is the same answer."""
    attempt = tx.attempt(attempt_id)
    stale = staleness(attempt, fence, launcher_id)
    job = tx.job(attempt.job_id) if attempt is not None and not stale else None
    if attempt is None or job is None:
        return Claimed(stale or "the job is gone")
    if attempt.state == AttemptState.CREATED:
        _take(tx, job, attempt, launcher_id)
    spec = tx.connection.scalar(_SPEC, {"key": job.id})
    return Claimed("", job, attempt, spec or "")


def staleness(attempt: Attempt | None, fence: int, launcher_id: str) -> str:
    """Why a launcher's word about an attempt does not count; "" when it does."""
    if attempt is None:
        return "no such attempt"
    if attempt.number != fence:
        return f"fence {fence} is not this attempt's, {attempt.number}"
    if attempt.state == AttemptState.ENDED:
        return "the attempt is over"
    if attempt.launcher_id and attempt.launcher_id != launcher_id:
        return f"launcher {attempt.launcher_id} has the attempt"
    return ""


def _take(tx: Transaction, job: Job, attempt: Attempt, launcher_id: str) -> None:
    attempt.state = AttemptState.CLAIMED
    attempt.launcher_id = launcher_id
    attempt.claimed_ns = tx.now_ns
    pool = attempt.pool

    def effect(index: Index) -> None:
        index.timers.cancel(TimerKind.RECLAIM, attempt_id)
        index.claimed(pool, attempt_id)

    attempt_id = attempt.id
    tx.after_commit(effect)
    tx.changed(job, attempt)
    tx.event(job, EventType.CLAIMED, f"launcher/{launcher_id}")
