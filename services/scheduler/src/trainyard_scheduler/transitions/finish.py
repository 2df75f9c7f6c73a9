"""An attempt is over; the job ends or waits for its next one."""

from __future__ import annotations

import json

from trainyard_protos.v1 import common_pb2

from trainyard_scheduler.domain.admission import kind_of
from trainyard_scheduler.domain.reasons import EventType, ExitReason, StopReason
from trainyard_scheduler.domain.retries import Ending, Outcome, Verdict, decide
from trainyard_scheduler.domain.states import JobState
from trainyard_scheduler.ledger import Transaction
from trainyard_scheduler.policy import read_policy
from trainyard_scheduler.tables import Attempt, Job
from trainyard_scheduler.transitions.steps import NS_PER_S, close_attempt, end_job, enqueue, reset_deadline

AVOIDED_S: dict[str, float] = {
    # What the job lacks there the yard does not know, for instance that a volume is bound to another machine.
    ExitReason.UNSCHEDULABLE: 300.0,
    # Its launcher is about to announce that the machine takes nothing: a drain, a loss, no room left.
    ExitReason.EVICTED: 30.0,
    ExitReason.NODE_LOST: 30.0,
}
_ENDS = {
    Outcome.SUCCEEDED: JobState.SUCCEEDED,
    Outcome.FAILED: JobState.FAILED,
    Outcome.CANCELLED: JobState.CANCELLED,
}


def finish(tx: Transaction, job: Job, attempt: Attempt, exit: common_pb2.Exit, actor: str, ended_ns: int) -> None:
    """Closes the attempt with this exit and does what the rules say."""
    close_attempt(tx, job, attempt, ended_ns, exit.reason)
    attempt.exit = job.exit = exit.SerializeToString()
    verdict = decide(
        ending(exit),
        StopReason(attempt.stop_reason),
        read_policy(job.policy).retries,
        job.retries_used,
        job.free_retries_used,
        cancel_message=job.message,  # kept since the job was asked to stop
    )
    if verdict.outcome in (Outcome.FAILED, Outcome.RETRY) and not attempt.stop_reason:
        _reject_checkpoint(job, exit)
    if verdict.outcome in (Outcome.RETRY, Outcome.BACK_TO_QUEUE):
        _requeue(tx, job, attempt, verdict, actor)
    else:
        end_job(tx, job, _ENDS[verdict.outcome], actor, verdict.reason, verdict.message)


def ending(exit: common_pb2.Exit) -> Ending:
    """The facts of an exit that decide."""
    return Ending(
        reason=exit.reason,
        message=exit.message,
        exit_code=exit.exit_code if exit.HasField("exit_code") else None,
        signal=exit.signal,
        matched_rule=exit.matched_rule if exit.HasField("matched_rule") else None,
        acknowledged=exit.acknowledged,
    )


def _requeue(tx: Transaction, job: Job, attempt: Attempt, verdict: Verdict, actor: str) -> None:
    if verdict.reason in AVOIDED_S:
        _avoid(tx, job, attempt, AVOIDED_S[verdict.reason])
    if verdict.outcome is Outcome.RETRY:
        job.free_retries_used += verdict.free
        job.retries_used += not verdict.free
    elif not job.started_ns:
        reset_deadline(tx, job)
    job.reason, job.message = verdict.reason, verdict.message
    enqueue(tx, job, tx.now_ns + int(verdict.delay_s * NS_PER_S) if verdict.delay_s else 0)
    tx.event(job, EventType.REQUEUED, actor, verdict.reason, verdict.message)


def _avoid(tx: Transaction, job: Job, attempt: Attempt, for_s: float) -> None:
    """For a while the job goes to other machines than the one that explains the end of its attempt."""
    exit = common_pb2.Exit.FromString(attempt.exit)
    machines = json.loads(attempt.machines)[exit.node : exit.node + 1] if exit.HasField("node") else []
    names = [name for name in machines if not kind_of(name)]
    job_id, until_ns = job.id, tx.now_ns + int(for_s * NS_PER_S)
    if names:
        tx.after_commit(lambda index: index.avoid(job_id, names, until_ns))


def _reject_checkpoint(job: Job, exit: common_pb2.Exit) -> None:
    """A checkpoint from which an attempt got nowhere is not resumed from again: the one before it may be whole."""
    if not exit.resumed_from or exit.progressed:
        return
    rejected = json.loads(job.rejected_checkpoints)
    if exit.resumed_from not in rejected:
        job.rejected_checkpoints = json.dumps([*rejected, exit.resumed_from])
