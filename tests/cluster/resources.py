"""TrainingJob resources of the testbed's cluster, and the operator that serves them."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from trainyard.cluster import Api, ApiError, load_configuration
from trainyard.home import read_endpoint

from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S
from scripts.testbed.ports import free_port
from scripts.testbed.server import Server, accepts
from tests.conftest import REPOSITORY, wait_until

KIND = "trainingjobs.trainyard.dev"
DEFINITION = REPOSITORY / "charts" / "trainyard" / "crds" / "trainingjobs.yaml"


def install(cluster: Cluster) -> None:
    """Gives the cluster the definition of the resource; the same one again changes nothing."""
    cluster.apply(YAML(typ="safe").load(DEFINITION.read_text()))
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{KIND}", f"--timeout={PATIENCE_S}s")
    cluster.kubectl("get", KIND, "--all-namespaces")  # is put off until its storage is ready, which comes later


@contextmanager
def namespace(cluster: Cluster) -> Iterator[str]:
    """An empty namespace, removed afterwards."""
    name = f"resources-{secrets.token_hex(4)}"
    cluster.create_namespace(name)
    try:
        yield name
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")


@contextmanager
def in_a_namespace(cluster: Cluster) -> Iterator[Resources]:
    """A namespace of a cluster that knows the resource."""
    install(cluster)
    with namespace(cluster) as name:
        yield Resources(cluster, name)


class Resources:
    """The TrainingJob resources of one namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def kubectl(self, *arguments: str, input: str | None = None, check: bool = True) -> str:
        """kubectl in the namespace."""
        return self.cluster.kubectl(f"--namespace={self.namespace}", *arguments, input=input, check=check)

    def apply(self, document: Mapping[str, Any]) -> str:
        """`kubectl apply` of a document; returns the resource's uid."""
        self.kubectl("apply", "--filename=-", input=json.dumps(document))
        return str(self.get(document["metadata"]["name"])["metadata"]["uid"])

    def dry_run(self, document: Mapping[str, Any]) -> str:
        """What the API server says against a document, as `kubectl create --dry-run=server` has it check."""
        path = f"/apis/trainyard.dev/v1alpha1/namespaces/{self.namespace}/trainingjobs"

        async def create() -> None:
            api = Api(load_configuration(str(self.cluster.kubeconfig)))
            try:
                await api.create(f"{path}?dryRun=All&fieldValidation=Strict", document)
            finally:
                await api.close()

        with pytest.raises(ApiError) as refused:
            asyncio.run(create())
        return str(refused.value)

    def get(self, name: str) -> dict[str, Any]:
        return self.cluster.get(KIND, name, f"--namespace={self.namespace}")

    def status(self, name: str) -> dict[str, Any]:
        """What the operator says; empty before it said anything."""
        return self.get(name).get("status") or {}

    def wait(self, name: str, condition: str) -> None:
        """`kubectl wait` for a condition."""
        self.kubectl("wait", f"--for=condition={condition}", f"{KIND}/{name}", f"--timeout={PATIENCE_S}s")

    def until(self, name: str, holds: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        """Waits until the status is as wanted; returns it."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [self.status(name)]
            return bool(holds(found[0]))

        wait_until(look, f"{name} {what}: {found}", PATIENCE_S)
        return found[0]

    def names(self) -> list[str]:
        listed = self.cluster.get(KIND, f"--namespace={self.namespace}")["items"]
        return [str(each["metadata"]["name"]) for each in listed]

    def delete(self, name: str, *arguments: str) -> None:
        """`kubectl delete`, which returns when the resource is gone."""
        self.kubectl("delete", f"{KIND}/{name}", f"--timeout={PATIENCE_S}s", *arguments)


class OperatorProcess(Server):
    """`python -m trainyard_operator` on this machine, for one namespace of the cluster and one yard.

    Args:
        yard: home of the yard, which is up when the operator starts for the first time.
        settings: of the operator.
        ca_file: root certificate of the yard; None on loopback.
    """

    name = "operator"

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        yard: Path,
        folder: Path,
        settings: Mapping[str, str],
        ca_file: Path | None = None,
    ) -> None:
        super().__init__(folder, free_port())
        self._ca_file = ca_file
        self._cluster, self._namespace, self._yard = cluster, namespace, yard
        self._settings = settings
        self._metrics_port = free_port()

    def command(self) -> list[str]:
        return [sys.executable, "-m", "trainyard_operator"]

    def environ(self) -> Mapping[str, str]:
        yard = read_endpoint(self._yard)
        assert yard is not None, "no yard runs"
        service = {
            "HOME": str(self._yard),
            "LISTEN": f"127.0.0.1:{self.port}",
            "METRICS_LISTEN": f"127.0.0.1:{self._metrics_port}",
            "ENDPOINT": yard.endpoint,
        } | ({"CA_FILE": str(self._ca_file)} if self._ca_file else {})
        operator = {"KUBECONFIG": str(self._cluster.kubeconfig), "NAMESPACES": self._namespace} | dict(self._settings)
        return {f"TRAINYARD_SERVICE_{name}": value for name, value in service.items()} | {
            f"TRAINYARD_OPERATOR_{name}": value for name, value in operator.items()
        }

    def ready(self) -> bool:
        return accepts(self.port)
