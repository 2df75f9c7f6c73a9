"""What fails around the pods and the yard: machines, the API server. Training goes on, or goes on elsewhere."""

from __future__ import annotations

from trainyard.client import JobHandle

from scripts.testbed.cluster.cluster import Cluster
from tests.cluster.counting import WAIT_S, at_step, counting
from tests.cluster.yards import ClusterYard
from tests.conftest import wait_until
from tests.jobs import document, output, reasons


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
        told = [f"{event.type} {event.reason} {event.message}" for event in (*running.events(), *late.events())]
        assert (running.status().attempt, late.status().attempt) == (1, 1), told
