"""The hook of the chart as a program: what it does to a cluster."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S

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


def run_hook(cluster: Cluster, **settings: str) -> subprocess.CompletedProcess[str]:
    environ = {f"TRAINYARD_SETUP_{name}": value for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, "-m", "trainyard_setup", "install"],
        env=os.environ | environ | {"KUBECONFIG": str(cluster.kubeconfig)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


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
