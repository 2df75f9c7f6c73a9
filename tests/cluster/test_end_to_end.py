"""The examples of this repository on a real cluster, from files of this machine to artifacts of the yard."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.cluster.yards import ClusterYard
from tests.conftest import REPOSITORY, wait_until

WAIT_S = 600


def example(name: str, job_file: str, folder: Path) -> Path:
    """A copy of an example whose two workers are a node each. They share the cores of this machine all the same."""
    shutil.copytree(REPOSITORY / "examples" / name, folder / name)
    file = folder / name / job_file
    nodes = 'nodes: 2\n  env: {OMP_NUM_THREADS: "1"}'
    text, found = re.subn(r"workersPerNode: 2", nodes, file.read_text())
    assert found == 1
    file.write_text(text)
    return file


@pytest.mark.timeout(1800)
def test_digits_over_two_nodes_survive_the_loss_of_a_pod_and_reach_their_accuracy(
    yard_on_cluster: ClusterYard, tmp_path: Path
) -> None:
    file = example("digits", "job.yaml", tmp_path)
    with yard_on_cluster.client() as client:
        job = client.submit(file)
        wait_until(lambda: any(client.versions(kind="checkpoint", job=job.id)), "a checkpoint", WAIT_S)
        pods = yard_on_cluster.get("pods", **{"job-id": job.id})
        assert len({pod["spec"]["nodeName"] for pod in pods}) == 2, "the cluster spreads the pods of a Job"
        yard_on_cluster.kubectl("delete", "pod", pods[1]["metadata"]["name"], "--wait=false")
        ended = job.wait(WAIT_S)
        assert [attempt.exit.reason for attempt in ended.attempts] == ["PodDeleted", "Completed"]
        assert ended.attempts[1].exit.resumed_from
        assert list(job.metrics("accuracy")["accuracy"].step) == list(range(1, 21))
        assert job.values()["accuracy"] >= 0.97
        assert [version.name for version in client.versions(job=job.id, kind="output")] == ["digits-model"]
        printed = yard_on_cluster.yard("logs", job.id).stdout
        assert "[rank 1]" in printed
        assert re.search(r"accuracy: 0\.9", printed)
    yard_on_cluster.assert_nothing_left(job.id)
