"""How a job is shown."""

from __future__ import annotations

import pytest
from trainyard.cli import job_views
from trainyard_protos.v1 import launcher_pb2
from trainyard_protos.v1 import scheduler_pb2 as pb


def test_a_running_attempt_is_shown_where_it_is_and_not_where_it_was_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = [pb.Placement(node=0, machine="planned-0"), pb.Placement(node=1, machine="planned-1")]
    attempts = [pb.Attempt(number=number, state="running", placements=places) for number in (1, 2)]
    job = pb.Job(id="0" * 32, name="digits", state="JOB_STATE_RUNNING", attempt=2, attempts=attempts)
    now = launcher_pb2.DescribeResponse(nodes=[launcher_pb2.NodeStatus(node=1, machine="real-1")])

    job_views.detail(job, now)

    rows = [line for line in capsys.readouterr().out.splitlines() if "planned-0" in line]
    assert ["planned-0, planned-1" in row for row in rows] == [True, False]
    assert "planned-0, real-1" in rows[1]


def test_an_explanation_says_what_keeps_a_node_from_running(capsys: pytest.CaptureFixture[str]) -> None:
    job = pb.Job(id="0" * 32, name="digits", state="JOB_STATE_STARTING", attempt=1)
    waiting = launcher_pb2.NodeStatus(node=1, reason="VolumeUnavailable", message="claim none not found")
    now = launcher_pb2.DescribeResponse(nodes=[launcher_pb2.NodeStatus(node=0), waiting])

    job_views.explanation(pb.Explanation(job=job, summary="digits is starting, attempt 1."), now)

    told = [line for line in capsys.readouterr().out.splitlines() if "does not run yet" in line]
    assert told == ["node 1 does not run yet: VolumeUnavailable: claim none not found"]
