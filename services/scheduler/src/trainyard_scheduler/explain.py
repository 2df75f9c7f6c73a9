"""What a person wants to know of a job: one paragraph, numbers, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from trainyard_protos.v1 import common_pb2, scheduler_pb2

from trainyard_scheduler import views
from trainyard_scheduler.domain.reasons import PendingReason
from trainyard_scheduler.domain.states import JobState
from trainyard_scheduler.index import Index
from trainyard_scheduler.tables import Attempt, Job
from trainyard_scheduler.transitions.steps import demand_of

_AHEAD_SHOWN = 20


def explain(job: Job, attempts: Sequence[Attempt], index: Index) -> scheduler_pb2.Explanation:
    """Why the job is where it is.

    Args:
        attempts: the job's, the oldest first.
    """
    free, total = index.totals()
    return scheduler_pb2.Explanation(
        job=views.job(job, index),
        summary=_summary(job, attempts, index),
        position=index.position(job.id),
        ahead=index.ahead(job.id, _AHEAD_SHOWN),
        wanted=views.resources(demand_of(job).total),
        free=views.resources(free),
        total=views.resources(total),
        next=_next(job, index),
    )


def _summary(job: Job, attempts: Sequence[Attempt], index: Index) -> str:
    state = JobState(job.state)
    if state is JobState.QUEUED:
        return _why_queued(job, index)
    sentence = f"{job.name} is {state.name.lower()}, attempt {job.attempt}"
    told = job.message.startswith(job.reason)
    why = [job.message] if told else [job.reason, job.message]
    sentence = ": ".join([sentence, *(part for part in why if part)])
    present = next((each for each in attempts if each.id == job.attempt_id), None)
    if state is JobState.STARTING and present and not present.claimed_ns:
        sentence += f": the launcher of pool '{present.pool}' has not taken it yet; if that lasts, its log says why"
    if present and (awaited := index.awaited(present.id)).reason:
        sentence += f". {awaited.reason}: {awaited.message}"
    if job.retries_used or job.free_retries_used:
        sentence += f". Retries so far: {job.retries_used} of the budget, {job.free_retries_used} free"
    if present and not present.exit and (before := [each.exit for each in attempts if each.exit]):
        exit = common_pb2.Exit.FromString(before[-1])
        sentence += f". The attempt before ended: {exit.reason}: {exit.message.removeprefix(f'{exit.reason}: ')}"
    return f"{sentence}."


def _why_queued(job: Job, index: Index) -> str:
    pending = index.pending(job.id)
    kind = {
        PendingReason.NEVER_FITS: "can never start on the machines there are",
        PendingReason.NO_POOL: "cannot start yet",
        PendingReason.NO_YARD: "cannot start yet",
        PendingReason.ROOM_HELD_BY_OTHERS: "cannot start yet",
        PendingReason.WAITING_FOR_MACHINES: "cannot start yet",
        PendingReason.BACKOFF: "waits before its next attempt",
    }.get(pending.reason, "is queued")
    before = f" The attempt before ended: {job.message}." if job.message else ""
    return f"{job.name} {kind} ({pending.reason or 'Ready'}): {pending.message}.{before}"


def _next(job: Job, index: Index) -> list[str]:
    state = JobState(job.state)
    short = job.id
    if state in (JobState.FAILED, JobState.CANCELLED):
        return [f"yard logs {short}", f"yard events {short}", f"yard retry {short}"]
    if state is JobState.SUCCEEDED:
        return [f"yard logs {short}", f"yard metrics {short}", f"yard artifacts list --job {short}"]
    if state is JobState.QUEUED:
        never = index.pending(job.id).never_fits
        return [f"yard cancel {short}", "yard jobs"] if never else [f"yard logs -f {short}", f"yard cancel {short}"]
    return [f"yard logs -f {short}", f"yard stacks {short}", f"yard cancel {short}"]
