"""The chart installed from its images, as a user sees it: jobs by kubectl, what stays of them, pods that die."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S
from tests.cluster.installed import (
    SERVICES,
    Training,
    applied,
    await_pods,
    but_for_a_dead_pod,
    installation,
    lives,
    settle,
)
from tests.cluster.release import Release
from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(8 * PATIENCE_S)]

DIGITS = REPOSITORY / "examples" / "digits"


@pytest.fixture(scope="module")
def installed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    with installation(cluster, tmp_path_factory.mktemp("installed")) as release:
        yield release


@pytest.fixture
def release(installed: Release) -> Release:
    settle(installed)
    return installed


def test_digits_applied_by_kubectl_train_on_two_nodes_to_their_accuracy(release: Release, tmp_path: Path) -> None:
    code = tmp_path / "digits"
    shutil.copytree(DIGITS, code, ignore=shutil.ignore_patterns("checkpoints", "exports", "__pycache__"))
    release.yard("artifacts", "put", "digits-code", code)
    job_id = applied(release, DIGITS / "cluster.yaml")
    first, second = await_pods(release, job_id, "Running")
    assert {first["spec"]["nodeName"], second["spec"]["nodeName"]} == set(release.cluster.nodes)
    # Followed to its end: the pod is removed soon after.
    by_kubectl = release.kubectl("logs", "--follow", first["metadata"]["name"], check=False)
    assert "epoch 1/20: loss" in by_kubectl

    release.kubectl("wait", "--for=condition=Succeeded", "trainingjob/digits", f"--timeout={int(PATIENCE_S)}s")
    with release.client() as client:
        job = client.job(job_id)
        assert [attempt.exit.reason for attempt in job.status().attempts] == ["Completed"]
        assert list(job.metrics("accuracy")["accuracy"].step) == list(range(1, 21))
        assert job.values()["accuracy"] >= 0.97
        kept = {version.checkpoint.step for version in client.versions(job=job_id, kind="checkpoint")}
        assert kept >= {18, 19, 20}
    printed = release.yard("logs", job_id)
    assert re.search(r"\[rank 1\].*worker 1 of 2", printed)
    assert re.search(r"accuracy: 0\.9[7-9]", printed)
    release.yard("artifacts", "get", "digits-model", tmp_path / "model")
    assert (tmp_path / "model" / "model.pt").stat().st_size > 10_000


def test_a_killed_worker_pod_has_its_job_go_on_from_the_checkpoint(release: Release, tmp_path: Path) -> None:
    training = Training.start(release, tmp_path, "killed", seed=1)
    stored = training.await_checkpoint()
    killed = training.pods()[1]["metadata"]["name"]
    release.kubectl("delete", "pod", killed, "--grace-period=0", "--force")
    training.await_attempt(2)
    reasons, found = training.finish()
    assert reasons == ["PodDeleted", "Completed"]
    assert but_for_a_dead_pod(found, stored) == []
    assert training.first_step(attempt=2) > stored


def test_services_deleted_one_after_the_other_do_not_touch_training(release: Release, tmp_path: Path) -> None:
    training = Training.start(release, tmp_path, "undisturbed", seed=2)
    training.advance(100)
    before = lives(training.pods())
    assert [restarts for _, restarts in before] == [0, 0]
    for service in SERVICES:
        selector = f"--selector=app.kubernetes.io/instance=yard,app.kubernetes.io/component={service}"
        release.kubectl("delete", "pods", selector)
        training.advance(100)
        settle(release)
    assert lives(training.pods()) == before
    reasons, found = training.finish()
    assert reasons == ["Completed"]
    assert found == []
