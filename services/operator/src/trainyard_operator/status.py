"""What the yard says of a job, as the status of a resource. Pure: the same words give the same status.

Fields that are absent from a result stay as they are; None removes one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, get_args

from trainyard.errors import YardError
from trainyard.spec.model import Reason
from trainyard_protos.v1 import common_pb2
from trainyard_protos.v1 import scheduler_pb2 as pb

from trainyard_operator import progress

Fields = dict[str, Any]

QUEUED, RUNNING, REFUSED = "Queued", "Running", "Refused"
SUCCEEDED, FAILED, CANCELLED = "Succeeded", "Failed", "Cancelled"
ENDED = frozenset({SUCCEEDED, FAILED, CANCELLED})
"""Phases of a job that is over; one that was refused never was a job."""
TROUBLES = frozenset(get_args(Reason)) | {"WaitingForMachines"}
"""Reasons of notes that say why a job does not get on: its image cannot be pulled, no machine takes its pods."""
_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
_LINES, _LINE, _MESSAGE = 10, 300, 4096
_LIVE: Fields = {"timeLeft": None}


def phase(state: pb.JobState.ValueType) -> str:
    """The state of a job as users of the cluster read it, for instance "Running"."""
    return pb.JobState.Name(state).removeprefix("JOB_STATE_").capitalize()


def of_job(job: pb.Job, known: Mapping[str, Any] | None = None) -> Fields:
    """All that a job says.

    Args:
        known: the fields after the newest event of the job. Why an attempt that has begun does not run is in its events
            alone: a reason that they gave stays.
    """
    at = phase(job.state)
    waiting = job.pending
    reason, message = waiting.reason or job.reason, waiting.message or job.message
    if known and not reason and at != QUEUED and at not in ENDED:
        reason, message = known.get("reason") or "", known.get("message") or ""
    fields: Fields = {
        "jobId": job.id,
        "phase": at,
        "reason": reason or None,
        "message": message[:_MESSAGE] or None,
        "attempt": job.attempt,
        "retriesUsed": job.retries_used,
        "submittedAt": moment(job.created_ns),
        "startedAt": moment(job.started_ns),
        "endedAt": moment(job.ended_ns),
        "eventSeq": job.event_seq,
        "exit": of_exit(job.exit) if job.HasField("exit") else None,
    }
    # While a later attempt runs, what it says itself counts.
    far = progress.of_progress(job.exit.progress) if at in ENDED else {}
    return fields | far | ({} if at == RUNNING else _LIVE)


def of_event(event: pb.Event) -> Fields:
    """What an event of a job tells without asking for the job."""
    at = phase(event.state)
    fields: Fields = {"phase": at, "attempt": event.attempt, "eventSeq": event.seq}
    if event.type == "Submitted":
        return fields  # what the job waits for is known already, and better
    if event.type == "Admitted":
        fields |= {"reason": None, "message": None}  # it waits no longer; where its pods are, they say themselves
    elif event.type != "Note" or event.reason in TROUBLES:
        fields |= {"reason": event.reason or None, "message": event.message[:_MESSAGE] or None}
    if event.type == "Running":
        fields["startedAt"] = moment(event.time_ns)
    return fields | ({} if at == RUNNING else _LIVE)


def of_pending(pending: pb.Pending) -> Fields:
    """Why a queued job is not running."""
    return {"reason": pending.reason or None, "message": pending.message[:_MESSAGE] or None}


def of_exit(ended: common_pb2.Exit) -> Fields:
    """How an attempt ended."""
    fields: Fields = {"reason": ended.reason, "message": ended.message[:_MESSAGE]}
    if ended.HasField("exit_code"):
        fields["exitCode"] = ended.exit_code
    if ended.signal:
        fields["signal"] = ended.signal
    if ended.HasField("first_failing_rank"):
        fields["rank"] = ended.first_failing_rank
    if ended.last_lines:
        fields["lastLines"] = [line[:_LINE] for line in ended.last_lines[-_LINES:]]
    return fields


def of_refusal(error: YardError) -> Fields:
    """A document that the yard does not take: each problem with the name of its field."""
    problems = [_problem(each) for each in error.problems]
    message = "; ".join(problems) or " ".join(filter(None, (error.message, error.hint)))
    return {"phase": REFUSED, "reason": error.reason or "Refused", "message": message[:_MESSAGE]}


def _problem(problem: Any) -> str:
    allowed = f"; allowed: {problem.allowed}" if problem.allowed else ""
    meant = f"; did you mean {problem.suggestion}?" if problem.suggestion else ""
    value = f" (is {problem.value})" if problem.value else ""
    return f"{problem.field or 'document'}: {problem.message}{value}{allowed}{meant}"


def of_forgotten() -> Fields:
    """A job that the yard no longer has, though the resource never saw its end."""
    return {
        "phase": FAILED,
        "reason": "JobNotFound",
        "message": "the yard no longer has this job: it was removed after its ttl, or the yard lost its database",
        **_LIVE,
    }


def conditions(
    fields: Mapping[str, Any], before: Sequence[Mapping[str, Any]], when: str, generation: int
) -> list[Fields]:
    """The conditions that follow from the other fields.

    Args:
        before: the conditions so far; one whose status stays keeps its time.
        when: the others changed.
    """
    since = {each["type"]: (each["status"], each.get("lastTransitionTime", when)) for each in before}
    found = []
    for kind, holds in _verdicts(fields).items():
        status = {True: "True", False: "False", None: "Unknown"}[holds]
        known, then = since.get(kind, ("", when))
        found.append(
            {
                "type": kind,
                "status": status,
                **_because(kind, status, fields),
                "lastTransitionTime": then if known == status else when,
                "observedGeneration": generation,
            }
        )
    return found


def _because(kind: str, status: str, fields: Mapping[str, Any]) -> Fields:
    if kind == "Accepted" and status == "True":
        return {"reason": "Submitted", "message": f"the yard has it as job {fields['jobId']}"}
    reason = fields.get("reason") or fields.get("phase") or "Waiting"
    trouble = (kind, status) in (("Accepted", "False"), ("Running", "False"), ("Failed", "True"))
    return {"reason": reason, "message": fields.get("message") or "" if trouble else ""}


def _verdicts(fields: Mapping[str, Any]) -> dict[str, bool | None]:
    at = fields.get("phase")
    over = at in ENDED or at == REFUSED
    return {
        "Accepted": True if fields.get("jobId") else False if at == REFUSED else None,
        "Running": at == RUNNING,
        "Finished": over,
        "Succeeded": at == SUCCEEDED if over else None,
        "Failed": at in (FAILED, REFUSED) if over else None,
    }


def changes(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> Fields:
    """The merge patch that makes `stored` what is wanted; empty when it is."""
    patch = {
        name: value for name, value in wanted.items() if value != stored.get(name) and not _both(value, stored, name)
    }
    # A merge patch goes into mappings: what an exit no longer has is removed by name.
    if isinstance(patch.get("exit"), dict):
        patch["exit"] = dict.fromkeys(stored.get("exit") or {}) | patch["exit"]
    return patch


def _both(value: Any, stored: Mapping[str, Any], name: str) -> bool:
    return value is None and name not in stored


def now() -> str:
    """This moment, as Kubernetes writes it."""
    return datetime.now(UTC).strftime(_FORMAT)


def moment(time_ns: int) -> str | None:
    """A time as Kubernetes writes it; None for no time."""
    return datetime.fromtimestamp(time_ns // 10**9, UTC).strftime(_FORMAT) if time_ns else None
