"""The yard of a benchmark on the cluster: all services in one process of this machine, and the operator in another."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import _repository  # noqa: F401
import psutil
from servicekit.settings import from_environment
from trainyard.home import read_endpoint
from trainyard.spec import Spec
from trainyard_launcher.backend import Facts, Launch
from trainyard_launcher.backends.kubernetes import manifests
from trainyard_launcher.settings import Settings
from trainyard_protos.v1 import common_pb2

from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.server import Server
from tests.cluster.resources import OperatorProcess
from tests.cluster.yards import ClusterYard

NODES = 4
HELD = Path(__file__).with_name("_held.py")
_CPU, _MEMORY = 0.1, 64 * 2**20


class Yard(ClusterYard):
    """All services, for pods with the agent in them as a user has them.

    Args:
        template: of the pods.
        held: whether what is admitted is not launched.
        settings: of the launcher.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        folder: Path,
        template: Mapping[str, Any],
        *,
        held: bool = False,
        **settings: str,
    ) -> None:
        template_file = {"KUBERNETES_POD_TEMPLATE": str(folder / "template.json")}
        super().__init__(cluster, namespace, folder, template_file | settings)
        self._template, self._held = template, held

    def prepare(self) -> None:
        super().prepare()
        (self.folder / "template.json").write_text(json.dumps(self._template))

    def command(self) -> list[str]:
        command = super().command()
        return [sys.executable, str(HELD), *command[3:]] if self._held else command

    def ready(self) -> bool:
        """Whether its operator can find it."""
        return super().ready() and read_endpoint(self.folder) is not None

    def raw_job(self, number: int, gpu: int = 0) -> dict[str, Any]:
        """The very Job that this yard makes of a gang, under a name of its own."""
        facts = Facts("default", f"raw-{number}", f"raw-{number}", f"{number:012d}", 1, NODES, 1, grace_s=1)
        amount = common_pb2.Resources(cpu=_CPU, memory_bytes=_MEMORY, gpu=gpu)
        launch = Launch(facts, [], amount, spec=Spec.model_validate_json(json.dumps(gang("raw", gpu)["spec"])))
        settings = from_environment(Settings, "TRAINYARD_LAUNCHER", self.environ())
        return manifests.job(launch, self.endpoint, settings, self._template)


class Operator(OperatorProcess):
    """The operator of a yard that serves under TLS."""

    def __init__(self, yard: ClusterYard, folder: Path) -> None:
        super().__init__(yard.cluster, yard.namespace, yard.folder, folder, {})
        self._of = yard

    def environ(self) -> Mapping[str, str]:
        tls = {"TRAINYARD_SERVICE_ENDPOINT": self._of.endpoint, "TRAINYARD_SERVICE_CA_FILE": str(self._of.ca_file)}
        return dict(super().environ()) | tls


class Services:
    """What the processes of a yard cost."""

    def __init__(self, *servers: Server) -> None:
        self._processes = [psutil.Process(server.process.pid) for server in servers if server.process is not None]

    def cpu_s(self) -> float:
        """Processor time so far, with that of processes they started and that are over."""
        return sum(sum(each.cpu_times()[:4]) for each in self._processes)

    def memory_bytes(self) -> int:
        """Resident now, with what they started."""
        family = [one for each in self._processes for one in (each, *each.children(recursive=True))]
        return sum(each.memory_info().rss for each in family)


def gang(name: str, gpu: int = 0) -> dict[str, Any]:
    """A job of 4 nodes with one worker each."""
    amount = {"cpu": "100m", "memory": "64Mi"} | ({"gpu": gpu} if gpu else {})
    spec = {
        "runtime": "process",
        "command": ["true"],
        "nodes": NODES,
        "resources": amount,
        "gracePeriod": "1s",
        "image": "example/none",
    }
    return {
        "apiVersion": "trainyard.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": spec,
    }


@contextlib.contextmanager
def started(*servers: Server) -> Iterator[None]:
    """They run for the length of the block, one started after the other. What their jobs made stays."""
    try:
        for server in servers:
            server.start()
        yield
    finally:
        for server in reversed(servers):
            server.kill()
