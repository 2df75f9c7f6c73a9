"""What fails around the pods: machines, the API server, the yard itself. Training goes on, or goes on elsewhere."""

from __future__ import annotations

from trainyard.client import JobHandle

from scripts.testbed.cluster.cluster import Cluster
from tests.cluster.yards import ClusterYard
from tests.conftest import wait_until
from tests.jobs import document, output, python, reasons

WAIT_S = 240

COUNTING = """
    import sys, time
    from pathlib import Path
    from trainyard import tracker
    folder = Path("checkpoints")
    folder.mkdir(exist_ok=True)
    done = max((int(file.stem) for file in folder.glob("*.bin")), default=0)
    print("from", done, flush=True)
    for step in range(done + 1, 41):
        tracker.log({"step": step}, step=step)
        (folder / ".draft").write_bytes(b"%d" % step)
        (folder / ".draft").rename(folder / f"{step}.bin")
        print("step", step, flush=True)
        time.sleep(float(sys.argv[1]))
"""


def counting(pause_s: float = 0.5, **spec: object) -> dict[str, object]:
    checkpoints = {"path": "checkpoints", "pattern": "{step}.bin", "keep": {"last": 2}}
    return document(python(COUNTING, str(pause_s)), checkpoints=checkpoints, gracePeriod="2s", **spec)


def at_step(job: JobHandle, step: int) -> None:
    wait_until(lambda: f"step {step}" in output(job), f"step {step} of {job.name}", WAIT_S)


def steps(job: JobHandle) -> list[int]:
    """The stitched series: every step once."""
    return list(job.metrics("step")["step"].step)


def machines(yard: ClusterYard, job: JobHandle) -> dict[int, str]:
    """Where the pods of a job are, by node."""
    pods = yard.get("pods", **{"job-id": job.id})
    index = "batch.kubernetes.io/job-completion-index"
    return {int(pod["metadata"]["labels"][index]): pod["spec"].get("nodeName", "") for pod in pods}


def test_a_machine_that_is_lost_has_its_job_go_on_elsewhere(own_yard: ClusterYard, cluster_alone: Cluster) -> None:
    with own_yard.client() as client:
        job = client.submit(counting(pause_s=1))
        at_step(job, 3)
        [lost] = machines(own_yard, job).values()
        cluster_alone.stop_node(lost)
        wait_until(lambda: job.status().attempt == 2, "a second attempt", WAIT_S)
        assert reasons(job)[0] == "NodeLost"
        assert job.wait(WAIT_S).reason == "Completed"
        assert job.status().free_retries_used == 1
        [went_on] = [line for line in output(job) if line.startswith("from") and line != "from 0"]
        assert int(went_on.split()[1]) >= 1
        assert steps(job) == list(range(1, 41))


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


def test_an_api_server_that_is_away_for_a_minute_disturbs_nothing(
    own_yard: ClusterYard, cluster_alone: Cluster
) -> None:
    with own_yard.client() as client:
        running = client.submit(counting(pause_s=2, nodes=2))
        at_step(running, 3)
        cluster_alone.stop_api()
        late = client.submit(document(["true"], name="late"))
        at_step(running, 34)
        cluster_alone.start_api()
        assert running.wait(WAIT_S).reason == "Completed"
        assert late.wait(WAIT_S).reason == "Completed"
        assert (running.status().attempt, late.status().attempt) == (1, 1)


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
