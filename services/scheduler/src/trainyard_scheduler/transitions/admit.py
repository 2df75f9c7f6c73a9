"""Queued jobs get machines: an attempt is created and announced."""

from __future__ import annotations

import json
from collections.abc import Sequence

from servicekit.ids import new_id
from servicekit.messages import LAUNCH, start_queue

from trainyard_scheduler.domain.admission import kind_of
from trainyard_scheduler.domain.reasons import EventType
from trainyard_scheduler.domain.states import AttemptState, JobState
from trainyard_scheduler.index import Admission, Index
from trainyard_scheduler.ledger import SCHEDULER, Transaction
from trainyard_scheduler.live_pools import Holding
from trainyard_scheduler.tables import Attempt, Job
from trainyard_scheduler.timers import TimerKind
from trainyard_scheduler.transitions.steps import NS_PER_S, move, named, start_deadline


def admit(tx: Transaction, admissions: Sequence[Admission], reclaim_after_s: float) -> list[Job]:
    """Admits those that are still queued (one may have been cancelled since the plan); returns them."""
    plan = {admission.job_id: admission for admission in admissions}
    queued = [job for job in tx.jobs(list(plan)) if job.state == JobState.QUEUED]
    for job in queued:
        _admit(tx, job, plan[job.id], reclaim_after_s)
    return queued


def _admit(tx: Transaction, job: Job, admission: Admission, reclaim_after_s: float) -> None:
    move(tx, job, JobState.STARTING)
    attempt = _next_attempt(tx, job, admission)
    job.attempt, job.attempt_id = attempt.number, attempt.id
    job.reason = job.message = ""
    job.not_before_ns = 0
    if not any(map(kind_of, admission.machines)):  # else it starts when its machines are there
        start_deadline(tx, job)
    _tell_index(tx, job, attempt, admission, int(reclaim_after_s * NS_PER_S))
    tx.add_attempt(attempt)
    tx.changed(job)
    tx.event(job, EventType.ADMITTED, SCHEDULER, message=f"on {named(admission.machines)}")
    announce(tx, attempt)


def _next_attempt(tx: Transaction, job: Job, admission: Admission) -> Attempt:
    return Attempt.model_construct(
        id=new_id(),
        job_id=job.id,
        number=job.attempt + 1,
        pool=admission.pool,
        machines=json.dumps(admission.machines),
        created_ns=tx.now_ns,
        state=str(AttemptState.CREATED),
    )


def _tell_index(tx: Transaction, job: Job, attempt: Attempt, admission: Admission, reclaim_after_ns: int) -> None:
    job_id, attempt_id = job.id, attempt.id
    holding = Holding(admission.pool, admission.machines, admission.node, attempt.created_ns)
    provision_ns = attempt.created_ns + int(admission.provision_timeout_s * NS_PER_S)

    def effect(index: Index) -> None:
        index.dequeue(job_id)
        index.hold(attempt_id, holding)
        index.tally.admissions += 1
        index.timers.after(TimerKind.RECLAIM, attempt_id, reclaim_after_ns)
        if holding.awaited:
            index.timers.at(TimerKind.PROVISION, attempt_id, provision_ns)

    tx.after_commit(effect)


def announce(tx: Transaction, attempt: Attempt) -> None:
    """A wake-up for the launchers of the attempt's pool."""
    tx.send(start_queue(attempt.pool), LAUNCH, attempt_id=attempt.id, fence=attempt.number)
