"""What `kubectl describe` says of jobs whose pods cannot run, or are taken away: the reason, and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest

from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S
from tests.cluster.installed import await_described, installation
from tests.cluster.release import Release
from tests.jobs import document, python

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(8 * PATIENCE_S)]

FOREVER = python("import signal; signal.pause()")
GREEDY = python("data = bytearray(1 << 30); data[::4096] = bytes([1]) * len(data[::4096])")


@pytest.fixture(scope="module")
def release(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    with installation(cluster, tmp_path_factory.mktemp("installed")) as release:
        yield release


def apply(release: Release, name: str, command: Sequence[str] = FOREVER, **spec: object) -> None:
    small: dict[str, object] = {"resources": {"cpu": "50m", "memory": "64Mi"}, "gracePeriod": "1s"}
    release.kubectl("apply", "--filename=-", input=json.dumps(document(command, name, **(small | spec))))


def await_running(release: Release, name: str) -> str:
    """Returns the name of its pod."""
    release.kubectl("wait", "--for=condition=Running", f"trainingjob/{name}", f"--timeout={int(PATIENCE_S)}s")
    [pod] = release.objects("pods", f"--selector=trainyard.dev/job={name}")
    return str(pod["metadata"]["name"])


def test_an_image_that_cannot_be_had(release: Release) -> None:
    apply(release, "no-image", image="localhost/none/such:1", kubernetes={"pullPolicy": "Never"})
    await_described(release, "no-image", "ImageUnavailable", "localhost/none/such:1", "check spec.image")


def test_pods_that_no_node_takes(release: Release) -> None:
    apply(release, "no-node", kubernetes={"nodeSelector": {"no": "such"}})
    await_described(release, "no-node", "NeverFits", "no machine has no=such", "spec.kubernetes.nodeSelector")


def test_more_than_any_node_has(release: Release) -> None:
    apply(release, "too-large", resources={"cpu": "50m", "memory": "4000Gi"})
    await_described(release, "too-large", "NeverFits", "too much memory for one node", "Lower spec.resources")


def test_a_worker_that_used_more_memory_than_it_may(release: Release) -> None:
    apply(release, "greedy", GREEDY)
    await_described(release, "greedy", "OutOfMemory", "raise spec.resources.memory")


def test_an_evicted_pod(release: Release) -> None:
    apply(release, "evicted")
    metadata = {"name": await_running(release, "evicted"), "namespace": release.namespace}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    path = f"/api/v1/namespaces/{release.namespace}/pods/{metadata['name']}/eviction"
    release.kubectl("create", "--raw", path, "--filename=-", input=json.dumps(eviction))
    await_described(release, "evicted", "Requeued", "Evicted: ", "its node is drained", "free retry 1 of 10")


def test_a_job_object_that_somebody_deleted(release: Release) -> None:
    apply(release, "deleted")
    await_running(release, "deleted")
    release.kubectl("delete", "jobs", "--selector=trainyard.dev/job=deleted", "--wait=false")
    await_described(release, "deleted", "Requeued", "PodDeleted: ", "yard cancel, or kubectl delete trainingjob")
