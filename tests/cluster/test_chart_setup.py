"""The hook of the chart as a program: what it does to a cluster."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from servicekit.ownership import ENDPOINT_VARIABLE, LAUNCHER, identity_label

from scripts.testbed.cluster.cluster import Cluster
from tests.cluster.hooks import run_hook

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def definition(cluster: Cluster, cluster_namespace: str) -> Iterator[dict[str, Any]]:
    """A custom resource definition as helm makes it."""
    group = f"{cluster_namespace}.example"
    schema = {"openAPIV3Schema": {"type": "object"}}
    made = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"things.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": "things", "kind": "Thing"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }
    _as_helm(cluster, made)
    yield made
    cluster.kubectl("delete", "crd", f"things.{group}", "--wait=false")


def _as_helm(cluster: Cluster, definition: dict[str, Any]) -> None:
    """Installs a definition as helm does, which gives up when a field is somebody else's."""
    cluster.kubectl("apply", "--server-side", "--field-manager=helm", "--filename=-", input=yaml.safe_dump(definition))


def test_an_upgrade_brings_definitions_up_to_date_and_a_later_installation_finds_them_so(
    cluster: Cluster, cluster_namespace: str, definition: dict[str, Any], tmp_path: Path
) -> None:
    newer = copy.deepcopy(definition)
    newer["spec"]["names"]["shortNames"] = ["th"]
    (tmp_path / "things.yaml").write_text(yaml.safe_dump(newer))
    place = {"RELEASE": "yard", "NAMESPACE": cluster_namespace, "JOBS_NAMESPACE": cluster_namespace}
    done = run_hook(cluster, **place, DEFINITIONS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert cluster.get("crd", definition["metadata"]["name"])["spec"]["names"]["shortNames"] == ["th"]
    newer["spec"]["names"]["shortNames"] = ["tg"]
    _as_helm(cluster, newer)


def test_a_secret_of_others_that_lacks_a_key_stops_it_with_what_to_do(cluster: Cluster, cluster_namespace: str) -> None:
    cluster.kubectl(
        *(f"--namespace={cluster_namespace}", "create", "secret", "generic", "mine", "--from-literal=tls.crt=x")
    )
    place = {"RELEASE": "yard", "NAMESPACE": cluster_namespace, "JOBS_NAMESPACE": cluster_namespace}
    done = run_hook(cluster, **place, GIVEN_CERTIFICATE_SECRET="mine")
    assert done.returncode == 1
    assert f"secret 'mine' in namespace '{cluster_namespace}' has no tls.key and no ca.crt" in done.stderr


def test_a_chart_of_another_version_is_refused_before_anything_is_made(
    cluster: Cluster, cluster_namespace: str
) -> None:
    place = {"RELEASE": "yard", "NAMESPACE": cluster_namespace, "JOBS_NAMESPACE": cluster_namespace}
    done = run_hook(cluster, **place, CHART_VERSION="99.1.0", TOKEN_SECRET="token")
    assert done.returncode == 1
    assert "the chart is of version 99.1.0, and the image of 0." in done.stderr
    assert cluster.get("secrets", f"--namespace={cluster_namespace}")["items"] == []


ENDPOINT = "yard-gateway.platform.svc:443"


def job(cluster: Cluster, namespace: str, name: str, endpoint: str, **labels: str) -> None:
    """Makes a Job of a launcher whose pods find no node."""
    made = {"app.kubernetes.io/managed-by": "trainyard", "trainyard.dev/pool": "cluster"} | labels
    container = {"name": "worker", "image": "none", "env": [{"name": ENDPOINT_VARIABLE, "value": endpoint}]}
    pod = {"restartPolicy": "Never", "nodeSelector": {"nowhere": "at-all"}, "containers": [container]}
    metadata = {"name": name, "namespace": namespace, "labels": made}
    cluster.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": {"spec": pod}}})


def jobs(cluster: Cluster, namespace: str) -> set[str]:
    return {each["metadata"]["name"] for each in cluster.get("jobs", f"--namespace={namespace}")["items"]}


def place(namespace: str, jobs_namespace: str) -> dict[str, str]:
    """What the chart tells the hooks of an installation."""
    where = {"RELEASE": "yard", "NAMESPACE": namespace, "JOBS_NAMESPACE": jobs_namespace}
    return where | {"LAUNCHER": "platform-yard", "ENDPOINT": ENDPOINT}


def test_the_namespace_of_jobs_is_made_once(cluster: Cluster, cluster_namespace: str) -> None:
    wanted = f"{cluster_namespace}-jobs"
    try:
        for _ in range(2):
            done = run_hook(cluster, "namespace", **place(cluster_namespace, wanted))
            assert done.returncode == 0, done.stderr
            labels = cluster.get("namespace", wanted)["metadata"]["labels"]
            assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    finally:
        cluster.kubectl("delete", "namespace", wanted, "--ignore-not-found", "--wait=false")


def test_an_upgrade_does_not_leave_jobs_behind_that_run_beside_the_yard(
    cluster: Cluster, cluster_namespace: str
) -> None:
    job(cluster, cluster_namespace, "theirs", "other:443")
    moving = place(cluster_namespace, "elsewhere")
    assert run_hook(cluster, **moving).returncode == 0
    job(cluster, cluster_namespace, "ours", ENDPOINT)
    done = run_hook(cluster, **moving)
    assert done.returncode == 1
    assert f"1 jobs run in namespace '{cluster_namespace}', for instance ours" in done.stderr
    assert f"upgrade with jobs.namespace={cluster_namespace} until they are over" in done.stderr


def test_a_removal_takes_the_jobs_of_its_own_launcher_alone(cluster: Cluster, cluster_namespace: str) -> None:
    job(cluster, cluster_namespace, "ours", ENDPOINT, **{LAUNCHER: identity_label("platform-yard")})
    job(cluster, cluster_namespace, "ours-from-before", ENDPOINT)
    job(cluster, cluster_namespace, "theirs", ENDPOINT, **{LAUNCHER: "other-yard"})
    job(cluster, cluster_namespace, "theirs-from-before", "other:443")
    done = run_hook(cluster, "remove", **place(cluster_namespace, cluster_namespace))
    assert done.returncode == 0, done.stderr
    assert jobs(cluster, cluster_namespace) == {"theirs", "theirs-from-before"}
