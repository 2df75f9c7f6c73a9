"""What a launcher says about an attempt it holds."""

from __future__ import annotations

import json
from typing import NamedTuple

from trainyard_protos.v1 import common_pb2, scheduler_pb2

from trainyard_scheduler.domain.admission import kind_of
from trainyard_scheduler.domain.reasons import EventType
from trainyard_scheduler.domain.states import AttemptState, JobState
from trainyard_scheduler.ledger import Transaction
from trainyard_scheduler.policy import read_policy
from trainyard_scheduler.tables import Attempt, Job
from trainyard_scheduler.timers import TimerKind
from trainyard_scheduler.transitions.claim import staleness
from trainyard_scheduler.transitions.finish import finish
from trainyard_scheduler.transitions.steps import NS_PER_S, move, named, start_deadline

STARTED = scheduler_pb2.ATTEMPT_PHASE_STARTED
FINISHING = scheduler_pb2.ATTEMPT_PHASE_FINISHING
PUBLISHING = scheduler_pb2.ATTEMPT_PHASE_PUBLISHING
ENDED = scheduler_pb2.ATTEMPT_PHASE_ENDED
_NOTE_MAX = 4096


class Answer(NamedTuple):
    """`stale`: the launcher's word no longer counts. `stop`: the attempt is wanted to stop."""

    stale: bool
    stop: bool = False


def report(tx: Transaction, request: scheduler_pb2.ReportAttemptRequest, finalize_timeout_s: float) -> Answer:
    """Applies a report. One that came late or twice changes nothing."""
    attempt = tx.attempt(request.attempt_id)
    job = tx.job(attempt.job_id) if attempt is not None else None
    if attempt is None or job is None or staleness(attempt, request.fence, request.launcher_id):
        return Answer(stale=True)
    if attempt.state == AttemptState.CREATED:
        return Answer(stale=True)  # nobody has claimed it: whoever reports has not either
    actor = f"launcher/{request.launcher_id}"
    when_ns = min(max(request.time_ns, attempt.created_ns), tx.now_ns) if request.time_ns else tx.now_ns
    if request.note or request.note_reason:
        tx.event(job, EventType.NOTE, actor, request.note_reason[:_NOTE_MAX], request.note[:_NOTE_MAX])
        tx.changed(job)
    if request.placements:
        _placed(tx, job, attempt, actor, request)
    if request.phase == STARTED:
        _started(tx, job, attempt, actor, when_ns)
    elif request.phase == FINISHING:
        _finishing(tx, job, attempt, actor, request.exit, finalize_timeout_s)
    elif request.phase == PUBLISHING:
        _publishing(tx, job, attempt, actor, request.exit)
    elif request.phase == ENDED:
        finish(tx, job, attempt, request.exit, actor, when_ns)
        return Answer(stale=False)
    return Answer(stale=False, stop=bool(attempt.stop_reason))


def _placed(
    tx: Transaction, job: Job, attempt: Attempt, actor: str, request: scheduler_pb2.ReportAttemptRequest
) -> None:
    """The cluster put nodes on machines: those that were planned, or new ones of a kind that was awaited."""
    planned = json.loads(attempt.machines)
    found = {each.node: each.machine for each in request.placements if each.machine}
    machines = [found.get(node, machine) for node, machine in enumerate(planned)]
    if machines == planned:
        return
    attempt.machines = json.dumps(machines)
    attempt_id, moved = attempt.id, tuple(machines)
    tx.after_commit(lambda index: index.move(attempt_id, moved))
    if not any(map(kind_of, machines)):
        start_deadline(tx, job)
    tx.changed(job, attempt)
    tx.event(job, EventType.NOTE, actor, "Placed", f"on {named(machines)}")


def _started(tx: Transaction, job: Job, attempt: Attempt, actor: str, when_ns: int) -> None:
    if attempt.started_ns:
        return
    attempt.started_ns = when_ns
    job.started_ns = job.started_ns or when_ns
    tx.changed(job, attempt)
    if attempt.state == AttemptState.CLAIMED:
        attempt.state = AttemptState.RUNNING
        move(tx, job, JobState.RUNNING)
        tx.event(job, EventType.RUNNING, actor)


def _finishing(
    tx: Transaction, job: Job, attempt: Attempt, actor: str, exit: common_pb2.Exit, finalize_timeout_s: float
) -> None:
    if attempt.state not in (AttemptState.CLAIMED, AttemptState.RUNNING):
        return
    attempt.state = AttemptState.FINALIZING
    attempt.exit = exit.SerializeToString()
    grace_s = read_policy(job.policy).grace_s
    attempt_id = attempt.id
    due_ns = attempt.finalize_by_ns = tx.now_ns + int((finalize_timeout_s + grace_s) * NS_PER_S)
    tx.after_commit(lambda index: index.timers.at(TimerKind.FINALIZE, attempt_id, due_ns))
    move(tx, job, JobState.FINALIZING)
    tx.changed(job, attempt)
    tx.event(job, EventType.FINALIZING, actor, exit.reason, exit.message)


def _publishing(tx: Transaction, job: Job, attempt: Attempt, actor: str, exit: common_pb2.Exit) -> None:
    """The attempt has succeeded: from now on neither a user nor time can change that, so that its launcher may make its
    outputs the newest versions before anybody sees the job's success."""
    if attempt.state not in (AttemptState.CLAIMED, AttemptState.RUNNING, AttemptState.FINALIZING):
        return
    if attempt.state != AttemptState.FINALIZING:
        move(tx, job, JobState.FINALIZING)
        tx.event(job, EventType.FINALIZING, actor, exit.reason, exit.message)
    attempt.state = AttemptState.PUBLISHING
    attempt.exit = exit.SerializeToString()
    attempt_id = attempt.id
    tx.after_commit(lambda index: index.timers.cancel(TimerKind.FINALIZE, attempt_id))
    tx.changed(job, attempt)
