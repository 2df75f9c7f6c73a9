"""A yard on this machine whose jobs run as pods of the testbed's cluster.

The pods' image holds next to nothing: the system, Python, torch and the agent are this machine's own, mounted by a pod
template, so that what is tested is what lies in the checkout.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from trainyard.client import Client
from trainyard.home import read_endpoint
from trainyard_protos.v1 import launcher_pb2
from trainyard_protos.v1.launcher_pb2_grpc import AgentServiceStub
from trainyard_setup.certificates import issue, make_authority

from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.cluster.images import BUSYBOX
from scripts.testbed.patience import PATIENCE_S
from scripts.testbed.ports import free_port
from scripts.testbed.server import Server
from tests.conftest import ACTIVE, wait_until

REPOSITORY = Path(__file__).parents[2]
_ENVIRONMENT = Path(sys.prefix)
_PYTHON = Path(sys.base_prefix)


def pod_template() -> dict[str, Any]:
    """Gives a pod this machine's system, interpreter and checkout, and takes the copying of the agent away."""
    folders = {
        "system": Path("/usr"),
        "libraries": Path("/usr/lib"),
        "loader": Path("/usr/lib64"),
        "python": _PYTHON,
        "checkout": REPOSITORY,
        "environment": _ENVIRONMENT,
    }
    seen_at = {"libraries": "/lib", "loader": "/lib64"}
    mounts = [
        {"name": name, "mountPath": seen_at.get(name, str(path)), "readOnly": True}
        for name, path in folders.items()
        if name != "environment" or REPOSITORY not in path.parents
    ]
    mounts.append({"name": "environment", "mountPath": "/opt/trainyard", "readOnly": True})
    return {
        "spec": {
            "initContainers": [{"name": "agent", "$patch": "delete"}],
            "containers": [
                {
                    "name": "worker",
                    "env": [{"name": "PATH", "value": f"{_ENVIRONMENT}/bin:/usr/bin:/bin"}],
                    "volumeMounts": mounts,
                }
            ],
            "volumes": [{"name": name, "hostPath": {"path": str(path)}} for name, path in folders.items()],
        }
    }


def machine_template() -> dict[str, Any]:
    """The same for pods whose agent comes from its image."""
    template = pod_template()
    del template["spec"]["initContainers"]
    mounts = template["spec"]["containers"][0]["volumeMounts"]
    mounts[:] = [mount for mount in mounts if mount["mountPath"] != "/opt/trainyard"]
    return template


class ClusterYard(Server):
    """All services in one process of this machine, reachable from pods under TLS.

    Args:
        namespace: of the pods; the yard's root certificate is put there.
        settings: of the launcher, beside those that it needs here.
    """

    name = "yard"

    def __init__(self, cluster: Cluster, namespace: str, folder: Path, settings: Mapping[str, str]) -> None:
        super().__init__(folder, free_port())
        self.cluster, self.namespace = cluster, namespace
        self._settings = settings

    @property
    def endpoint(self) -> str:
        return f"{self.cluster.gateway_address}:{self.port}"

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.crt"

    def prepare(self) -> None:
        if self.ca_file.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC)
        authority = make_authority("test", now)
        server = issue(authority, "test", [self.cluster.gateway_address, "127.0.0.1"], now, 30)
        self.ca_file.write_bytes(authority.certificate)
        (self.folder / "tls.crt").write_bytes(server.certificate)
        (self.folder / "tls.key").write_bytes(server.key)
        (self.folder / "pod.yaml").write_text(json.dumps(pod_template()))
        self.cluster.kubectl(
            *("create", "configmap", "trainyard-ca", f"--namespace={self.namespace}"), f"--from-file={self.ca_file}"
        )

    def command(self) -> list[str]:
        folder = self.folder
        return [
            *(sys.executable, "-m", "trainyard_embedded", f"--home={folder}"),
            *(f"--host={self.cluster.gateway_address}", f"--port={self.port}"),
            *(f"--tls-cert={folder}/tls.crt", f"--tls-key={folder}/tls.key", f"--tls-ca={self.ca_file}"),
        ]

    def environ(self) -> Mapping[str, str]:
        of_kubernetes = {
            "NAMESPACE": self.namespace,
            "KUBECONFIG": str(self.cluster.kubeconfig),
            "WORKER_IMAGE": BUSYBOX,
            "POD_TEMPLATE": str(self.folder / "pod.yaml"),
            "ALLOWED_TOLERATIONS": "*",
        }
        launcher = {f"KUBERNETES_{name}": value for name, value in of_kubernetes.items()} | {
            "BACKEND": "kubernetes",
            "POOL": self.namespace,
        }
        return {f"TRAINYARD_LAUNCHER_{name}": value for name, value in (launcher | dict(self._settings)).items()}

    def ready(self) -> bool:
        """Whether it serves: its port is open before that."""
        found = read_endpoint(self.folder)
        return found is not None and self.process is not None and found.pid == self.process.pid

    def client(self) -> Client:
        token = (self.folder / "token").read_text().strip()
        return Client(self.endpoint, token=token, ca_file=self.ca_file)

    def yard(self, *arguments: str | Path, input: str | None = None) -> subprocess.CompletedProcess[str]:
        """`yard ARGUMENTS...` against this yard, to its end."""
        environ = os.environ | {
            "TRAINYARD_HOME": str(self.folder),
            "TRAINYARD_ENDPOINT": self.endpoint,
            "TRAINYARD_CA_FILE": str(self.ca_file),
        }
        command = [str(_ENVIRONMENT / "bin" / "yard"), *map(str, arguments)]
        return subprocess.run(command, env=environ, input=input, capture_output=True, text=True, timeout=240)

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """kubectl in the yard's namespace."""
        return self.cluster.kubectl(f"--namespace={self.namespace}", *arguments, input=input)

    def join(self, attempt_id: str, node: int, token: str) -> str:
        """What the launcher answers to who shows a token: why it is refused, or ""."""
        request = launcher_pb2.JoinRequest(attempt_id=attempt_id, node=node, service_account_token=token)
        credentials = grpc.ssl_channel_credentials(self.ca_file.read_bytes())
        with grpc.secure_channel(self.endpoint, credentials) as channel:
            try:
                AgentServiceStub(channel).Join(request, timeout=60)
            except grpc.RpcError as error:
                return str(error.details())
        return ""

    def assert_nothing_left(self, job_id: str = "") -> None:
        """Of a job, or of all jobs, the cluster keeps no object but those of failed attempts that it removes itself."""
        selector = ",".join(
            ["app.kubernetes.io/managed-by=trainyard", *([f"trainyard.dev/job-id={job_id}"] if job_id else [])]
        )
        kinds = "jobs,pods,services,secrets,configmaps"

        def left() -> list[str]:
            found = self.cluster.get(kinds, f"--namespace={self.namespace}", f"--selector={selector}")["items"]
            kept = {_attempt(each) for each in found if is_kept(each)}
            return [f"{each['kind']}/{each['metadata']['name']}" for each in found if _attempt(each) not in kept]

        wait_until(lambda: not left(), f"the end of {left()}", PATIENCE_S)

    def cancel_all(self) -> None:
        """Ends what tests left running, failed ones too."""
        with self.client() as client:
            jobs = [client.job(job.id) for job in client.list(states_in=ACTIVE, include_owned=True)]
            for job in jobs:
                job.cancel()
            for job in jobs:
                job.wait(PATIENCE_S, check=False)

    def get(self, kind: str, **selectors: str) -> list[dict[str, Any]]:
        """Objects of the namespace."""
        labels = [f"--selector={','.join(f'trainyard.dev/{k}={v}' for k, v in selectors.items())}"] if selectors else []
        found: list[dict[str, Any]] = self.cluster.get(kind, f"--namespace={self.namespace}", *labels)["items"]
        return found


def is_kept(found: Mapping[str, Any]) -> bool:
    """Whether an object is the Job of a failed attempt that the cluster removes after a time."""
    return "trainyard.dev/kept" in found["metadata"].get("annotations", {})


def _attempt(found: Mapping[str, Any]) -> str:
    return str(found["metadata"]["labels"]["trainyard.dev/attempt-id"])


@contextmanager
def running(cluster: Cluster, namespace: str, folder: Path, **settings: str) -> Iterator[ClusterYard]:
    """A yard that is up for the length of the block."""
    yard = ClusterYard(cluster, namespace, folder, settings)
    yard.start()
    try:
        yield yard
    finally:
        if yard.alive:
            yard.stop()
