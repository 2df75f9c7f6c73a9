"""How nodes make an attempt."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainyard_launcher.attempts import Attempt, Phase
from trainyard_launcher.backend import Facts, NodeEnd
from trainyard_protos.v1 import common_pb2

NODES = 3
OK = common_pb2.Exit(reason="Completed", exit_code=0, acknowledged=True)


def attempt_of(nodes: int) -> Attempt:
    return Attempt(Facts("default", "job", "name", "attempt", 1, nodes, 2, 30), now=0, minted=0)


def failed(code: int) -> common_pb2.Exit:
    return common_pb2.Exit(reason="WorkerFailed", exit_code=code, acknowledged=True)


def test_an_attempt_has_started_when_its_last_node_has() -> None:
    attempt = attempt_of(2)
    attempt.advance(0, Phase.RUNNING)
    assert list(attempt.due()) == []
    attempt.advance(1, Phase.RUNNING)
    assert list(attempt.due()) == [Phase.RUNNING]
    assert list(attempt.due()) == []


def test_an_end_that_comes_at_once_is_all_that_is_told() -> None:
    attempt = attempt_of(1)
    attempt.advance(0, Phase.ENDED, OK)
    assert list(attempt.due()) == [Phase.ENDED]


def test_the_node_that_failed_first_is_the_verdict_not_the_one_that_ended_first() -> None:
    attempt = attempt_of(2)
    attempt.advance(1, Phase.FINISHING, failed(5))
    attempt.advance(0, Phase.ENDED, common_pb2.Exit(reason="Stopped", message="PeerFailed"))
    attempt.advance(1, Phase.ENDED, failed(5))
    verdict = attempt.verdict()
    assert (verdict.reason, verdict.exit_code, verdict.node) == ("WorkerFailed", 5, 1)


def at(failed_ns: int, *, lost_peer: bool = False) -> common_pb2.Exit:
    return common_pb2.Exit(reason="WorkerFailed", exit_code=1, failed_ns=failed_ns, lost_peer=lost_peer)


@pytest.mark.parametrize(
    ("heard_first", "heard_second"),
    [
        (at(20), at(10)),
        (at(10, lost_peer=True), at(20)),
        (common_pb2.Exit(reason="Stopped"), at(20)),
    ],
)
def test_the_node_whose_worker_failed_by_itself_and_first_explains_the_attempt(
    heard_first: common_pb2.Exit, heard_second: common_pb2.Exit
) -> None:
    attempt = attempt_of(2)
    attempt.advance(0, Phase.FINISHING, heard_first)
    attempt.advance(1, Phase.FINISHING, heard_second)
    assert attempt.verdict().node == 1


def test_a_node_that_was_stopped_after_its_worker_had_raised_has_failed() -> None:
    attempt = attempt_of(2)
    attempt.advance(0, Phase.FINISHING, at(10, lost_peer=True))
    attempt.stop_reason = "PeerFailed"
    raised = common_pb2.Raised(type="ValueError", message="bad")
    attempt.advance(1, Phase.ENDED, common_pb2.Exit(reason="Stopped", first_failing_rank=3, exception=raised))
    verdict = attempt.verdict()
    assert (verdict.reason, verdict.node, verdict.message) == ("WorkerFailed", 1, "rank 3 raised ValueError: bad")


def test_memory_of_a_node_without_a_record_is_the_limit_and_the_peak_of_its_heartbeats() -> None:
    attempt = attempt_of(1)
    attempt.nodes[0].resident_peak = 2**28
    limit = common_pb2.MemoryUse(limit_bytes=2**29, sampled=True, enforced=True)
    exit = attempt.exit_without_record(NodeEnd("attempt", 0, None, out_of_memory=True, memory=limit), ["so far"])
    assert (exit.memory.peak_bytes, exit.memory.limit_bytes) == (2**28, 2**29)
    assert list(exit.last_lines) == ["so far"]


def test_an_attempt_is_acknowledged_when_every_node_is() -> None:
    attempt = attempt_of(2)
    attempt.advance(0, Phase.ENDED, OK)
    attempt.advance(1, Phase.ENDED, common_pb2.Exit(reason="Completed", unstored=["weights"]))
    verdict = attempt.verdict()
    assert not verdict.acknowledged
    assert list(verdict.unstored) == ["weights"]


def test_an_attempt_came_as_far_as_its_furthest_node() -> None:
    attempt = attempt_of(2)
    attempt.note_progress(common_pb2.Progress(step=12, total_steps=20, updated_ns=1, metrics={"loss": 0.5}))
    attempt.advance(0, Phase.ENDED, common_pb2.Exit(reason="WorkerFailed", exit_code=1))
    assert attempt.verdict().progress == common_pb2.Progress(step=12, total_steps=20, updated_ns=1)
    attempt.advance(1, Phase.ENDED, common_pb2.Exit(progress=common_pb2.Progress(step=20, updated_ns=2)))
    assert attempt.verdict().progress == common_pb2.Progress(step=20, total_steps=20, updated_ns=2)
    assert not attempt_of(1).verdict().HasField("progress")


def test_a_failure_stops_the_nodes_whose_workers_run_and_a_wish_of_the_scheduler_all() -> None:
    attempt = attempt_of(1)
    assert not attempt.stops(Phase.RUNNING)
    attempt.stop_reason = "PeerFailed"
    assert attempt.stops(Phase.STARTING) and attempt.stops(Phase.RUNNING) and not attempt.stops(Phase.FINISHING)
    attempt.stop_reason = "Cancelled"
    assert attempt.stops(Phase.FINISHING)


def test_an_end_without_a_record_while_stopping_counts_as_stopped() -> None:
    attempt = attempt_of(1)
    attempt.stop_reason = "Cancelled"
    assert attempt.exit_without_record(NodeEnd("attempt", 0, None)).reason == "Stopped"
    attempt.stop_reason = "DeadlineExceeded"
    assert attempt.exit_without_record(NodeEnd("attempt", 0, None)).reason == "DeadlineExceeded"


def test_memory_explains_an_end_without_a_record_before_anything_else() -> None:
    attempt = attempt_of(1)
    assert attempt.exit_without_record(NodeEnd("attempt", 0, None, out_of_memory=True)).reason == "OutOfMemory"


exits = st.sampled_from([None, OK, failed(1), failed(2)])
steps = st.lists(st.tuples(st.integers(0, NODES - 1), st.sampled_from(Phase), exits), max_size=40)


@given(steps)
def test_whatever_nodes_say_phases_are_told_once_and_in_order(said: list[tuple[int, Phase, common_pb2.Exit]]) -> None:
    attempt = attempt_of(NODES)
    told: list[Phase] = []
    for node, phase, exit in said:
        before = attempt.nodes[node].phase
        attempt.advance(node, phase, exit)
        assert attempt.nodes[node].phase >= before
        told += attempt.due()
    assert told == sorted(set(told))
    assert (Phase.ENDED in told) == attempt.over


@given(steps)
def test_the_first_failure_stays_the_first(said: list[tuple[int, Phase, common_pb2.Exit]]) -> None:
    attempt = attempt_of(NODES)
    seen: int | None = None
    for node, phase, exit in said:
        attempt.advance(node, phase, exit)
        seen = attempt.first_failure if seen is None else seen
        assert attempt.first_failure == seen


@pytest.mark.parametrize("step_ns", [86_400 * 10**9, -86_400 * 10**9])
def test_a_step_of_the_wall_clock_is_not_taken_for_the_deadline(monkeypatch: pytest.MonkeyPatch, step_ns: int) -> None:
    now_ns = time.time_ns()
    late, early = (
        Attempt(Facts("default", "job", "name", "attempt", 1, 1, 1, 30, deadline_ns=due_ns), now=0, minted=0)
        for due_ns in (now_ns, now_ns + 3600 * 10**9)
    )
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + step_ns)
    assert (late.past_deadline, early.past_deadline) == (True, False)
