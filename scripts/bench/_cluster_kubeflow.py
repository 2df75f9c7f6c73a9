"""Kubeflow's training operator as shipped, beside the cluster: built from its Go module, kept by version."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import _repository  # noqa: F401

from scripts.testbed import fetch
from scripts.testbed.cluster import binaries
from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.ports import free_port
from scripts.testbed.server import Server, accepts

PYTORCHJOBS = "/apis/kubeflow.org/v1/namespaces/{}/pytorchjobs"
NAMESPACE = "kubeflow"
_SECRET = "training-operator-webhook-cert"
_WEBHOOK = "validator.training-operator.kubeflow.org"
source = binaries.Source(
    name="training-operator",
    module="github.com/kubeflow/training-operator",
    version="v1.8.1",
    programs={"training-operator": "cmd/training-operator.v1"},
)


class TrainingOperator(Server):
    """`training-operator` with its defaults, but for ports and folders."""

    name = "training-operator"

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(folder, free_port())
        self._cluster = cluster
        self._ports = {"metrics-bind-address": f"127.0.0.1:{free_port()}", "webhook-server-port": str(free_port())}

    def prepare(self) -> None:
        """Its kinds, and what it wants to find: its namespace, a secret to fill and a webhook to sign."""
        kubectl = self._cluster.kubectl
        for file in sorted(_definitions().glob("*.yaml")):
            kubectl("apply", "--server-side", "--force-conflicts", f"--filename={file}")
        kubectl("wait", "--for=condition=Established", "crd/pytorchjobs.kubeflow.org", "--timeout=120s")
        self._cluster.apply(*_furniture())

    def command(self) -> list[str]:
        flags = self._ports | {"health-probe-bind-address": f"127.0.0.1:{self.port}", "zap-log-level": "error"}
        # It looks for its certificates below /tmp, whatever it is told: it gets one of its own.
        alone = ["unshare", "--mount", "sh", "-ec", 'mount --bind "$0" /tmp; exec "$@"', str(self.folder)]
        program = str(source.program("training-operator"))
        return [*alone, program, *(f"--{name}={value}" for name, value in flags.items())]

    def environ(self) -> Mapping[str, str]:
        return {"KUBECONFIG": str(self._cluster.kubeconfig), "TMPDIR": "/tmp"}

    def ready(self) -> bool:
        """Its certificates would be mounted from the secret; here they are copied."""
        secret = self._cluster.get("secret", _SECRET, f"--namespace={NAMESPACE}").get("data") or {}
        if "tls.crt" not in secret:
            return False
        folder = self.folder / "k8s-webhook-server" / "serving-certs"
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in secret.items():
            (folder / name).write_bytes(base64.b64decode(content))
        return accepts(self.port) and accepts(int(self._ports["webhook-server-port"]))


@contextlib.contextmanager
def kubeflow(cluster: Cluster, folder: Path) -> Iterator[TrainingOperator]:
    """The operator for the length of the block; its kinds and its namespace are removed afterwards."""
    operator = TrainingOperator(cluster, folder)
    try:
        operator.start()
        yield operator
    finally:
        operator.kill()
        cluster.kubectl("delete", f"validatingwebhookconfiguration/{_WEBHOOK}", "--ignore-not-found")
        cluster.kubectl("delete", f"namespace/{NAMESPACE}", "--ignore-not-found")


def pytorch_job(name: str, pod: Mapping[str, Any], workers: int) -> dict[str, Any]:
    """A PyTorchJob of a master and so many workers.

    Args:
        pod: spec of the pods; its container has to be named `pytorch`.
    """
    template = {"replicas": 1, "restartPolicy": "Never", "template": {"spec": dict(pod)}}
    replicas = {"Master": template} | ({"Worker": template | {"replicas": workers}} if workers else {})
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {"pytorchReplicaSpecs": replicas},
    }


def _definitions() -> Path:
    return fetch.kept(fetch.CACHE / f"{source.name}-crds-{source.version}", _copy_definitions)


def _copy_definitions(folder: Path) -> None:
    what = f"{source.module}@{source.version}"
    found = json.loads(fetch.go(f"download {what}", "mod", "download", "-json", what, cwd=os.sep))
    for file in (Path(found["Dir"]) / "manifests" / "base" / "crds").glob("kubeflow.org_*.yaml"):
        shutil.copyfile(file, folder / file.name)


def _furniture() -> list[dict[str, Any]]:
    inside = {"namespace": NAMESPACE}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": inside | {"name": _SECRET}, "type": "Opaque"},
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": _WEBHOOK},
        },
    ]
