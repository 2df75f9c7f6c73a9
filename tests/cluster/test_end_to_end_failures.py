"""The API server and a node fail under an installed chart, and DeepSpeed trains on it. Each takes minutes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S
from tests.cluster.installed import (
    Training,
    applied,
    await_described,
    await_pods,
    but_for_a_dead_pod,
    explained,
    installation,
    lives,
    pods_of,
    settle,
)
from tests.cluster.release import Release
from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(8 * PATIENCE_S)]

AWAY_S = 60
REQUEUED_S = 60
SERVICES_NODE, OTHER_NODE = "node-1", "node-2"
DEEPSPEED = REPOSITORY / "examples" / "deepspeed"


@pytest.fixture(scope="module")
def installed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """One whose services are all on the same node, so that the other one can be lost without them."""
    parts = ("scheduler", "launcher", "metrics", "artifacts", "operator", "gateway", "redis")
    there = {part: {"nodeSelector": {"kubernetes.io/hostname": SERVICES_NODE}} for part in parts}
    with installation(cluster, tmp_path_factory.mktemp("installed"), **there) as release:
        yield release


@pytest.fixture
def release(installed: Release) -> Release:
    settle(installed)
    return installed


def test_a_minute_without_the_api_server_does_not_touch_training(
    release: Release, cluster_alone: Cluster, tmp_path: Path
) -> None:
    training = Training.start(release, tmp_path, "without-api", seed=3)
    training.await_checkpoint()
    before = lives(training.pods())
    cluster_alone.stop_api()
    end = time.monotonic() + AWAY_S
    while time.monotonic() < end:
        training.advance(1)
        time.sleep(1)
    cluster_alone.start_api()
    settle(release)
    training.advance(100)
    assert lives(training.pods()) == before
    reasons, found = training.finish()
    assert reasons == ["Completed"]
    assert found == []


def test_the_job_of_a_lost_node_goes_on_from_its_checkpoint_on_the_other_one(
    release: Release, cluster_alone: Cluster, tmp_path: Path
) -> None:
    training = Training.start(release, tmp_path, "node-lost", seed=4)
    stored = training.await_checkpoint()
    assert OTHER_NODE in {pod["spec"]["nodeName"] for pod in training.pods()}
    stopped_ns = time.time_ns()
    cluster_alone.stop_node(OTHER_NODE)
    training.await_attempt(2)
    await_described(release, "node-lost", "NodeLost: machine node-2 is gone", "kubectl describe node node-2")
    assert {pod["spec"]["nodeName"] for pod in training.pods(attempt=2)} == {SERVICES_NODE}
    assert pods_of(release, training.job_id, attempt=1) == [], "a node that is off lets go of no pod by itself"
    with release.client() as client:
        lost, _ = client.job(training.job_id).status().attempts
    assert (lost.ended_ns - stopped_ns) / 1e9 < REQUEUED_S
    reasons, found = training.finish()
    assert reasons == ["NodeLost", "Completed"]
    assert but_for_a_dead_pod(found, stored) == []
    assert training.first_step(attempt=2) > stored


def test_deepspeed_trains_on_two_nodes_to_its_accuracy(release: Release, tmp_path: Path) -> None:
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(release.yard("render", deepspeed_file(tmp_path)))
    job_id = applied(release, rendered)
    pods = await_pods(release, job_id, "Running")
    assert {pod["spec"]["nodeName"] for pod in pods} == set(release.cluster.nodes)
    with release.client() as client, explained(release, job_id):
        job = client.job(job_id)
        ended = job.wait(4 * PATIENCE_S, check=False)
        assert [attempt.exit.reason for attempt in ended.attempts] == ["Completed"]
        assert list(job.metrics("accuracy")["accuracy"].step) == list(range(1, 11))
        assert job.values()["accuracy"] >= 0.9
        assert {version.checkpoint.step for version in client.versions(kind="checkpoint", job=job_id)} >= {9, 10}
    assert "epoch 10/10" in release.yard("logs", job_id)


def deepspeed_file(folder: Path) -> Path:
    """The example, with its two workers on a node each. The extension is compiled once, into a folder both pods see."""
    compiled = folder / "compiled"
    compiled.mkdir()
    compiled.chmod(0o777)
    yaml = YAML(typ="safe")
    document = yaml.load(DEEPSPEED / "job.yaml")
    spec = document["spec"]
    spec["nodes"] = spec.pop("workersPerNode")
    spec["resources"]["cpu"] = "200m"  # other tests' installations have their share of the nodes
    spec["code"] = {"path": str(DEEPSPEED), "exclude": ["checkpoints", ".saving"]}
    # The compiler's usual name leads through /etc, where the pods have their image's files and not this machine's.
    # Two compilers beside a worker would want more memory than the pod has.
    spec["env"] |= {"CXX": "g++", "MAX_JOBS": "1", "TORCH_EXTENSIONS_DIR": "/compiled"}
    spec["kubernetes"] = {
        "volumes": [{"name": "compiled", "mountPath": "/compiled", "hostPath": str(compiled)}],
        "topology": "spread",
    }
    file = folder / "job.yaml"
    yaml.dump(document, file)
    return file
