"""What others do to a namespace of jobs: another yard in it, and people who change and delete what the yard made."""

from __future__ import annotations

import pytest
from trainyard.client import JobHandle

from scripts.testbed.cluster.cluster import Cluster
from tests.cluster.yards import ClusterYard, running
from tests.conftest import wait_until
from tests.jobs import document, output, python

WAIT_S = 240
WAITING = """
    import os, time
    print("begun", flush=True)
    while not os.path.exists("/tmp/go"):
        time.sleep(0.1)
    print("done", flush=True)
"""


def begun(job: JobHandle) -> None:
    wait_until(lambda: "begun" in output(job, 0), f"{job.name} to begin", WAIT_S)


def let_go(yard: ClusterYard, job_id: str) -> None:
    """Lets the workers of a job end."""
    for pod in yard.get("pods", **{"job-id": job_id}):
        yard.kubectl("exec", pod["metadata"]["name"], "--container=worker", "--", "touch", "/tmp/go")


def test_two_yards_in_one_namespace_with_one_pools_name_leave_each_others_jobs_alone(
    own_yard: ClusterYard, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with own_yard.client() as client:
        job = client.submit(document(python(WAITING)))
        begun(job)
        own_yard.kubectl("delete", "configmap", "trainyard-ca")
        with running(cluster, own_yard.namespace, tmp_path_factory.mktemp("other")) as other, other.client() as guest:
            # Once it has looked at what is there, it takes work.
            wait_until(lambda: guest.pools(), "the other yard's pool", WAIT_S)
            theirs = guest.submit(document(["true"], name="theirs", resources={"cpu": "50m", "memory": "32Mi"}))
            wait_until(lambda: other.get("pods", **{"job-id": theirs.id}), "the other yard's pod", WAIT_S)
            theirs.cancel()
            theirs.wait(WAIT_S, check=False)
            wait_until(lambda: not other.get("jobs", **{"job-id": theirs.id}), "it to be taken away", WAIT_S)
        let_go(own_yard, job.id)
        assert job.wait(WAIT_S, check=False).reason == "Completed"
        assert job.status().attempt == 1


def test_an_attempt_outlives_a_lost_service_and_facts_that_cannot_be_read(own_yard: ClusterYard) -> None:
    with own_yard.client() as client:
        job = client.submit(document(python(WAITING), nodes=2, gracePeriod="2s"))
        begun(job)
    [service] = own_yard.get("services", **{"job-id": job.id})
    own_yard.kubectl("delete", "service", service["metadata"]["name"])

    def remade() -> bool:
        found = own_yard.get("services", **{"job-id": job.id})
        return [each["metadata"]["uid"] for each in found] not in ([], [service["metadata"]["uid"]])

    wait_until(remade, "the service to be made again", WAIT_S)
    own_yard.kill()
    selector = f"--selector=trainyard.dev/job-id={job.id}"
    own_yard.kubectl("annotate", "jobs", selector, "--overwrite", "trainyard.dev/facts={")
    own_yard.start()
    with own_yard.client() as client:
        job = client.job(job.id)
        wait_until(lambda: "FactsUnreadable" in [each.reason for each in job.events()], "a remark", WAIT_S)
        let_go(own_yard, job.id)
        assert job.wait(WAIT_S, check=False).reason == "Completed"
        assert job.status().attempt == 1
        assert output(job, 0) == ["begun", "done"]
