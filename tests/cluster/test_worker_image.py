"""The image that jobs run in when they name none, on a real kubelet: nobody's user, nothing that can be written beside
/tmp, and nothing of this machine.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from trainyard.client import Client, JobHandle

from scripts.testbed import fetch, images
from scripts.testbed.cluster import layout, locks
from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S
from tests.cluster.conftest import in_a_namespace
from tests.cluster.yards import ClusterYard
from tests.conftest import REPOSITORY, wait_until
from tests.jobs import document, output, python

WAIT_S = 4 * PATIENCE_S
NEEDED = 25 * 10**9
"""Bytes of disk: what the builder keeps, the archive, and both forms in which the node has it are 6 GB each."""
EVERYTHING = """
    import numpy.testing, sklearn, torch, triton, deepspeed, transformers, optuna, mlflow, trainkit
    from torch.utils.tensorboard import SummaryWriter
    doubled = torch.compile(lambda x: torch.sin(x) * 2)
    assert torch.allclose(doubled(torch.ones(8)), torch.ones(8).sin() * 2)
    assert torch.linalg.svdvals(torch.eye(2)).sum() == 2
    print("compiled")
"""
"""Of what the build takes away, nothing may be missed."""
WRITABLE = """
    import os, signal
    print(os.getuid(), [path for path in ("/", "/etc", "/opt/worker", "/usr/lib", "/tmp") if os.access(path, os.W_OK)])
    print("here", flush=True)
    signal.pause()
"""

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[str]:
    """The one node that has the image. Neither it nor the disk keeps any of it."""
    with locks.lasting(cluster.layout, _worker_image(cluster)) as name:
        yield name


@contextmanager
def _worker_image(cluster: Cluster) -> Iterator[str]:
    for folder in (fetch.CACHE, layout.RUNTIME):
        free = shutil.disk_usage(folder).free
        if free < NEEDED:
            pytest.skip(
                f"the worker's image needs {NEEDED / 1e9:.0f} GB of disk, {folder} has {free / 1e9:.0f} GB free"
            )
    name, wanted = cluster.nodes[0], images.reference("worker")
    try:
        if images.reference("agent") not in cluster.images()[name]:
            cluster.load_image(images.archive("agent"))
        cluster.load_image(images.archive("worker"), name)
        yield name
    finally:
        cluster.remove_image(wanted)
        images.remove("worker")


@pytest.fixture(scope="module")
def yard(cluster: Cluster, node: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterYard]:
    """A yard whose jobs run in the worker's image, all with a read-only root."""
    file = tmp_path_factory.mktemp("template") / "pod.yaml"
    file.write_text(json.dumps(_template(node)))
    settings = {
        "AGENT_IMAGE": images.reference("agent"),
        "WORKER_IMAGE": images.reference("worker"),
        "PULL_POLICY": "Never",
        "POD_TEMPLATE": str(file),
    }
    made = contextmanager(in_a_namespace)(
        cluster, tmp_path_factory, **{f"KUBERNETES_{name}": value for name, value in settings.items()}
    )
    with locks.lasting(cluster.layout, made) as found:
        yield found


def _template(node: str) -> dict[str, Any]:
    """As the guide has it for `jobs.podTemplate`."""
    worker = {
        "name": "worker",
        "securityContext": {"readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "containers": [worker],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        }
    }


@pytest.fixture
def client(yard: ClusterYard) -> Iterator[Client]:
    with yard.client() as client:
        yield client
    yard.cancel_all()


def example(name: str, folder: Path) -> Path:
    """A copy of an example that asks for less processor, for both workers and the agent to fit on a small node."""
    shutil.copytree(REPOSITORY / "examples" / name, folder / name)
    file = folder / name / "job.yaml"
    text, found = re.subn("cpu: 1,", "cpu: 500m,", file.read_text())
    assert found == 1
    file.write_text(text)
    return file


def completed(yard: ClusterYard, job: JobHandle) -> None:
    """Waits for its end, which has to come with the first attempt."""
    ended = job.wait(WAIT_S, check=False)
    printed = yard.yard("logs", job.id).stdout[-4000:]
    assert [attempt.exit.reason for attempt in ended.attempts] == ["Completed"], f"{ended.message}\n{printed}"


def test_everything_in_it_can_be_imported_and_compiled_with(yard: ClusterYard, client: Client) -> None:
    job = client.submit(document(python(EVERYTHING), resources={"cpu": 1, "memory": "3Gi"}))
    completed(yard, job)
    assert output(job)[-1] == "compiled"


def test_nobodys_user_can_write_to_tmp_alone_and_no_folder_is_the_machines(yard: ClusterYard, client: Client) -> None:
    job = client.submit(document(python(WRITABLE), gracePeriod="1s"))
    wait_until(lambda: "here" in output(job), f"{job.name} to print", WAIT_S)
    assert output(job) == ["1000 ['/tmp']", "here"]
    [pod] = yard.get("pods", **{"job-id": job.id})
    assert [each["name"] for each in pod["spec"]["volumes"] if "hostPath" in each] == []
    assert pod["spec"]["containers"][0]["image"] == images.reference("worker")
    job.cancel()
    assert job.wait(WAIT_S, check=False).reason == "Cancelled"


def test_digits_reach_their_accuracy_by_torchrun(yard: ClusterYard, client: Client, tmp_path: Path) -> None:
    job = client.submit(example("digits", tmp_path))
    completed(yard, job)
    assert list(job.metrics("accuracy")["accuracy"].step) == list(range(1, 21))
    assert job.values()["accuracy"] >= 0.97
    assert [version.name for version in client.versions(job=job.id, kind="output")] == ["digits-model"]
    yard.assert_nothing_left(job.id)


def test_deepspeed_compiles_its_operation_and_trains(yard: ClusterYard, client: Client, tmp_path: Path) -> None:
    job = client.submit(example("deepspeed", tmp_path))
    completed(yard, job)
    assert list(job.metrics("accuracy")["accuracy"].step) == list(range(1, 11))
    assert job.values()["accuracy"] >= 0.9
    assert any(client.versions(kind="checkpoint", job=job.id))
    yard.assert_nothing_left(job.id)
