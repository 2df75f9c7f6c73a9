"""What the yard says of a job, as fields, conditions and events of a resource."""

from __future__ import annotations

import json
from typing import Any

import pytest
from trainyard.errors import Conflict, InvalidSpec
from trainyard.spec import Problem, load
from trainyard_operator import progress, status, words
from trainyard_operator.resource import FINALIZER, read, submit_request
from trainyard_operator.roster import Roster
from trainyard_protos.v1 import common_pb2, metrics_pb2
from trainyard_protos.v1 import scheduler_pb2 as pb

SECOND = 10**9
BEST = {"path": "c", "pattern": "s-{step}", "keep": {"best": {"metric": "val/loss", "mode": "min"}}}


ANNOTATIONS = {
    "example.com/cost": "a 7",
    "kubectl.kubernetes.io/last-applied-configuration": "{}",
    "trainyard.dev/operator": "x",
}


def body(**changed: Any) -> dict[str, Any]:
    metadata = {"name": "digits", "namespace": "team", "uid": "u-1", "resourceVersion": "7", "generation": 2}
    return {
        "apiVersion": "trainyard.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": metadata | {"labels": {"team": "vision"}, "annotations": ANNOTATIONS, "managedFields": []},
        "spec": {"command": ["true"], "checkpoints": BEST},
    } | changed


def job(state: pb.JobState.ValueType, **fields: Any) -> pb.Job:
    return pb.Job(id="j-1", name="digits", state=state, created_ns=SECOND, event_seq=9, **fields)


def event(type: str, state: pb.JobState.ValueType, **fields: Any) -> pb.Event:
    return pb.Event(seq=255, kind="Job", object_id="j-1", type=type, state=state, time_ns=SECOND, attempt=1, **fields)


def test_what_is_submitted_is_the_document_alone_under_the_uid() -> None:
    request = submit_request(read(body()))
    assert request.idempotency_key == "u-1"
    assert request.document.filename == "team/digits"
    assert load(request.document.text).metadata.labels == {"team": "vision"}
    assert load(request.document.text).metadata.annotations == {"example.com/cost": "a 7"}
    assert set(json.loads(request.document.text)["metadata"]) == {"name", "labels", "annotations"}
    assert not request.secrets_checked
    assert submit_request(read(body()), secrets_checked=True).secrets_checked


def test_a_document_is_kept_only_until_it_was_submitted() -> None:
    assert read(body(status={"jobId": "j-1"})).document == ""


def test_the_best_metric_is_the_one_that_the_checkpoints_are_kept_by() -> None:
    assert read(body()).best == ("val/loss", "min")
    assert read(body(spec={"command": ["true"]})).best is None


def test_a_queued_job_says_what_it_waits_for() -> None:
    waiting = pb.Pending(reason="WaitingForCapacity", message="2 GPUs are missing")
    fields = status.of_job(job(pb.JOB_STATE_QUEUED, pending=waiting))
    assert (fields["phase"], fields["reason"], fields["message"]) == (
        "Queued", "WaitingForCapacity", "2 GPUs are missing",
    )  # fmt: skip
    assert (fields["submittedAt"], fields["startedAt"]) == ("1970-01-01T00:00:01Z", None)


def test_a_failed_job_says_how_it_ended() -> None:
    ended = common_pb2.Exit(reason="OutOfMemory", message="rank 3", exit_code=137, signal="SIGKILL",
                            first_failing_rank=3, last_lines=["x" * 1000] * 20)  # fmt: skip
    fields = status.of_job(job(pb.JOB_STATE_FAILED, reason="RetryLimit", exit=ended))
    assert fields["exit"] == {
        "reason": "OutOfMemory", "message": "rank 3", "exitCode": 137, "signal": "SIGKILL", "rank": 3,
        "lastLines": ["x" * 300] * 10,
    }  # fmt: skip


def test_a_note_changes_the_reason_only_when_it_says_why_a_job_does_not_get_on() -> None:
    trouble = event("Note", pb.JOB_STATE_STARTING, reason="ImageUnavailable", message="no such image")
    assert status.of_event(trouble)["reason"] == "ImageUnavailable"
    assert "reason" not in status.of_event(event("Note", pb.JOB_STATE_RUNNING, reason="LimitsNotEnforced", message="m"))


def test_what_ends_trouble_removes_its_reason() -> None:
    assert status.of_event(event("Running", pb.JOB_STATE_RUNNING))["reason"] is None


def test_a_refusal_names_every_field() -> None:
    problems = [
        Problem("f", 1, "spec.ttl", "2", "a duration needs a unit", "a text with units", "2s"),
        Problem("f", 2, "spec.nodes", "0", "too small", "a whole number from 1", ""),
    ]
    fields = status.of_refusal(InvalidSpec("wrong", reason="InvalidSpec", problems=problems))
    assert fields == {
        "phase": "Refused",
        "reason": "InvalidSpec",
        "message": "spec.ttl: a duration needs a unit (is 2); allowed: a text with units; did you mean 2s?; "
        "spec.nodes: too small (is 0); allowed: a whole number from 1",
    }


def test_a_refusal_without_problems_says_what_to_do() -> None:
    assert status.of_refusal(Conflict("no", reason="X", hint="try y"))["message"] == "no try y"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "Unknown False False Unknown Unknown"),
        ({"jobId": "j", "phase": "Queued"}, "True False False Unknown Unknown"),
        ({"jobId": "j", "phase": "Running"}, "True True False Unknown Unknown"),
        ({"jobId": "j", "phase": "Succeeded"}, "True False True True False"),
        ({"jobId": "j", "phase": "Failed"}, "True False True False True"),
        ({"jobId": "j", "phase": "Cancelled"}, "True False True False False"),
        ({"phase": "Refused"}, "False False True False True"),
    ],
)
def test_conditions_follow_from_the_phase(fields: dict[str, Any], expected: str) -> None:
    found = status.conditions(fields, (), "t", 1)
    assert [each["type"] for each in found] == ["Accepted", "Running", "Finished", "Succeeded", "Failed"]
    assert " ".join(each["status"] for each in found) == expected


def test_the_message_of_a_cancel_is_in_the_status() -> None:
    fields = status.of_job(job(pb.JOB_STATE_CANCELLED, reason="Cancelled", message="wrong data"))
    assert (fields["phase"], fields["reason"], fields["message"]) == ("Cancelled", "Cancelled", "wrong data")
    ended = status.of_event(event("Cancelled", pb.JOB_STATE_CANCELLED, reason="Cancelled", message="wrong data"))
    assert ended["message"] == "wrong data"


def test_what_keeps_a_job_from_running_is_said_by_its_condition() -> None:
    fields = {"jobId": "j", "phase": "Starting", "reason": "ImageUnavailable", "message": "check spec.image"}
    running = status.conditions(fields, (), "t", 1)[1]
    assert (running["status"], running["reason"], running["message"]) == (
        "False",
        "ImageUnavailable",
        "check spec.image",
    )


def test_a_condition_keeps_its_time_while_it_holds() -> None:
    running = status.conditions({"jobId": "j", "phase": "Running"}, (), "t1", 1)
    ended = status.conditions({"jobId": "j", "phase": "Failed"}, running, "t2", 1)
    assert {each["type"]: each["lastTransitionTime"] for each in ended} == {
        "Accepted": "t1", "Running": "t2", "Finished": "t2", "Succeeded": "t2", "Failed": "t2",
    }  # fmt: skip


def test_a_patch_has_what_differs_and_removes_what_is_gone() -> None:
    stored = {"phase": "Running", "timeLeft": "3m", "exit": {"reason": "a", "signal": "SIGKILL"}}
    wanted = {"phase": "Running", "timeLeft": None, "reason": None, "exit": {"reason": "b"}}
    assert status.changes(wanted, stored) == {"timeLeft": None, "exit": {"reason": "b", "signal": None}}


def test_a_newer_number_of_an_event_alone_is_not_written() -> None:
    tracked = Roster().see(read(body(status={"jobId": "j-1", "phase": "Running", "eventSeq": 3})))
    assert tracked is not None
    tracked.say({"eventSeq": 4}, "t")
    assert tracked.patch() == {}
    tracked.say({"phase": "Stopping"}, "t")
    assert tracked.patch().keys() == {"phase", "eventSeq", "conditions"}


def test_an_older_state_of_a_resource_is_passed_over() -> None:
    roster = Roster()
    assert roster.see(read(body())) is not None
    older = body()
    older["metadata"] |= {"resourceVersion": "6"}
    assert roster.see(read(older)) is None


def test_events_that_come_before_their_job_is_known_are_kept() -> None:
    roster = Roster()
    tracked = roster.see(read(body()))
    assert tracked is not None
    early = event("Admitted", pb.JOB_STATE_STARTING)
    roster.stray(early)
    assert roster.bind(tracked, job(pb.JOB_STATE_QUEUED)) == [early]
    assert roster.of_job("j-1") is tracked


def test_an_event_of_a_job_is_told_once_however_often_it_is_posted() -> None:
    failed = event("Failed", pb.JOB_STATE_FAILED, reason="WorkerFailed", message="rank 0 ended")
    first, again = (words.of_event(failed, read(body())) for _ in range(2))
    assert first == again
    assert first["metadata"] == {"name": "digits.u-1.ff", "namespace": "team"}
    assert (first["type"], first["reason"], first["message"]) == ("Warning", "Failed", "WorkerFailed: rank 0 ended")
    assert first["involvedObject"]["uid"] == "u-1"


@pytest.mark.parametrize(
    ("said", "type_", "reason", "message"),
    [
        (event("Submitted", pb.JOB_STATE_QUEUED), "Normal", "Submitted",
         "the yard has it as job j-1: 'yard logs -f j-1'"),
        (event("Running", pb.JOB_STATE_RUNNING), "Normal", "Running", "the workers of attempt 1 run"),
        (event("Succeeded", pb.JOB_STATE_SUCCEEDED, reason="Completed"), "Normal", "Succeeded", "Completed"),
        (event("Note", pb.JOB_STATE_STARTING, reason="Unschedulable", message="m"), "Warning", "Unschedulable", "m"),
        (event("Note", pb.JOB_STATE_RUNNING, reason="Odd", message="m"), "Normal", "Odd", "m"),
    ],
)  # fmt: skip
def test_events_are_told_in_words_of_the_cluster(said: pb.Event, type_: str, reason: str, message: str) -> None:
    found = words.of_event(said, read(body()))
    assert (found["type"], found["reason"], found["message"]) == (type_, reason, message)


def test_inner_steps_of_a_job_are_no_events() -> None:
    assert not words.told(event("Claimed", pb.JOB_STATE_STARTING))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0s"), (40.4, "40s"), (61, "1m1s"), (7500, "2h5m"), (7205, "2h"), (90000, "1d1h"), (-3, "0s")],
)
def test_a_time_is_written_with_its_two_largest_units(seconds: float, expected: str) -> None:
    assert progress.duration(seconds) == expected


def test_progress_is_steps_of_how_many() -> None:
    far = common_pb2.Progress(step=1200, total_steps=2000, updated_ns=1, seconds_left=720)
    assert progress.of_progress(far) == {
        "step": 1200, "totalSteps": 2000, "progress": "1200/2000 (60%)", "timeLeft": "12m",
    }  # fmt: skip
    assert progress.of_progress(common_pb2.Progress(step=5, updated_ns=1))["progress"] == "5"
    assert progress.of_progress(common_pb2.Progress()) == {}


def test_the_best_value_is_the_greatest_or_the_least() -> None:
    series = metrics_pb2.SeriesInfo(name="val/loss", min_value=0.123456, max_value=9)
    assert progress.of_best(series, "min") == {"best": "val/loss=0.1235"}
    assert progress.of_best(series, "max") == {"best": "val/loss=9"}


def test_a_resource_is_held_by_the_operators_finalizer() -> None:
    held = body()
    held["metadata"] |= {"finalizers": ["other", FINALIZER], "deletionTimestamp": "t"}
    assert read(held).held
    assert read(held).deleting
    assert not read(body()).held


def test_of_a_job_that_is_no_resource_only_the_newest_events_are_kept() -> None:
    roster = Roster()
    for seq in range(1, 1001):
        roster.stray(pb.Event(seq=seq, kind="Job", object_id="j-1"))
    tracked = roster.see(read(body()))
    assert tracked is not None
    kept = [each.seq for each in roster.bind(tracked, job(pb.JOB_STATE_RUNNING))]
    assert kept == list(range(951, 1001))
