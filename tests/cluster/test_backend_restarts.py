"""The yard itself fails, while the pods of its jobs go on without it."""

from __future__ import annotations

from tests.cluster.counting import WAIT_S, at_step, counting
from tests.cluster.yards import ClusterYard
from tests.conftest import wait_until
from tests.jobs import document, output


def test_a_yard_that_is_killed_finds_its_pods_again(own_yard: ClusterYard) -> None:
    with own_yard.client() as client:
        job = client.submit(counting(nodes=2))
        at_step(job, 3)
    own_yard.kill()
    own_yard.start()
    with own_yard.client() as client:
        job = client.job(job.id)
        assert job.wait(WAIT_S).reason == "Completed"
        assert job.status().attempt == 1
        assert output(job, 0) == ["from 0", *(f"step {step}" for step in range(1, 41))]


def test_what_ends_while_the_yard_is_away_is_told_when_it_is_back(own_yard: ClusterYard) -> None:
    with own_yard.client() as client:
        job = client.submit(counting(pause_s=1))
        at_step(job, 3)
    own_yard.kill()
    own_yard.kubectl("delete", "pods", f"--selector=trainyard.dev/job-id={job.id}", "--wait=true")
    own_yard.start()
    with own_yard.client() as client:
        job = client.job(job.id)
        wait_until(lambda: job.status().attempt == 2, "a second attempt", WAIT_S)
        assert job.wait(WAIT_S).reason == "Completed"


def test_a_yard_that_is_killed_again_and_again_leaves_no_object(own_yard: ClusterYard) -> None:
    """Killed while it makes objects, while pods begin and while they end: every job ends well, and nothing stays."""
    ids = []
    for _ in range(3):
        with own_yard.client() as client:
            ids += [client.submit(document(["true"], nodes=2, name=f"short-{len(ids)}")).id for _ in range(2)]
        own_yard.kill()
        own_yard.start()
    with own_yard.client() as client:
        ended = [client.job(each).wait(WAIT_S, check=False).reason for each in ids]
    assert ended == ["Completed"] * 6
    own_yard.assert_nothing_left()
