"""Pods for the tests of the testbed's cluster."""

from typing import Any

from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.cluster.images import BUSYBOX

PATIENCE = "--timeout=240s"
SERVE = "mkdir -p /tmp/www; echo from $HOSTNAME > /tmp/www/index.html; exec httpd -f -p 8080 -h /tmp/www"
"""Answers on port 8080 with the name of the pod."""


def pod(name: str, script: str, node: str = "", **spec: Any) -> dict[str, Any]:
    """A pod that runs a shell script, once; on a node of choice."""
    container = {"name": "main", "image": BUSYBOX, "command": ["sh", "-ec", script]}
    where = {"nodeSelector": {"kubernetes.io/hostname": node}} if node else {}
    settings = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]}
    metadata = {"name": name, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": settings | where | spec}


def service(name: str, port: int, **spec: Any) -> dict[str, Any]:
    """A Service of the pod with its name."""
    settings = {"selector": {"app": name}, "ports": [{"port": port}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": settings | spec}


class Namespace:
    """A namespace of the cluster."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    def apply(self, *objects: dict[str, Any]) -> None:
        self.cluster.apply(*(item | {"metadata": item["metadata"] | {"namespace": self.name}} for item in objects))

    def kubectl(self, *arguments: str, check: bool = True) -> str:
        return self.cluster.kubectl(f"--namespace={self.name}", *arguments, check=check)

    def wait(self, condition: str, *names: str) -> None:
        self.kubectl("wait", f"--for={condition}", PATIENCE, *names)

    def printed(self, name: str) -> str:
        """What the pod printed, when it has succeeded."""
        self.wait("jsonpath={.status.phase}=Succeeded", f"pod/{name}")
        return self.kubectl("logs", name)
