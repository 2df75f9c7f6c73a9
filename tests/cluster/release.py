"""An installation of the chart on the testbed's cluster, used as its guide says: helm, kubectl, a forwarded port."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from trainyard.client import Client

from scripts.testbed import images
from scripts.testbed.cluster import binaries
from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S
from tests.conftest import REPOSITORY
from tests.jobs import document, python

CHART = REPOSITORY / "charts" / "trainyard"
Values = Mapping[str, Any]
_OUTSIDE = "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings"


class HelmFailed(Exception):
    """helm ended with another code than 0; the message is what it printed."""


def helm(*arguments: str, environ: Mapping[str, str] | None = None) -> str:
    """Runs helm; returns what it printed.

    Raises:
        HelmFailed: it did not do what it was asked.
    """
    done = subprocess.run(
        [str(binaries.helm.program("helm")), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | dict(environ or {}),
        timeout=4 * PATIENCE_S,
    )
    if done.returncode:
        raise HelmFailed(done.stdout + done.stderr)
    return done.stdout + (done.stderr if arguments[0] == "uninstall" else "")


def rendered(values: Values) -> list[dict[str, Any]]:
    """The objects that the chart makes of some values."""
    return [found for found in yaml.safe_load_all(template(yaml.safe_dump(dict(values)))) if found]


def template(values: str) -> str:
    """What `helm template` prints for a file of values."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(values)
        file.flush()
        return helm("template", "yard", str(CHART), "--namespace=platform", "--include-crds", f"--values={file.name}")


def image_values(*names: str) -> dict[str, Any]:
    """Values that name images of the testbed, which its nodes have to be given."""
    keys = {"services": "image", "agent": "agentImage", "worker": "workerImage"}
    found = {}
    for name in names:
        repository, _, tag = images.reference(name).rpartition(":")
        found[keys[name]] = {"repository": repository, "tag": tag, "pullPolicy": "Never"}
    return found


def small_job(code: str, **spec: Any) -> dict[str, object]:
    """A job of a few lines of Python, in an image that has little else."""
    image = image_values("services")["image"]
    fields: dict[str, Any] = {
        "image": f"{image['repository']}:{image['tag']}",
        "kubernetes": {"pullPolicy": "Never"},
        "resources": {"cpu": "100m", "memory": "64Mi"},
    }
    return document(python(code), **(fields | spec))


class Release:
    """One installation, in a namespace of its own.

    Args:
        folder: for its files.
    """

    name = "yard"

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.folder = folder
        # Other tests have resources and operators of their own on this cluster.
        self.values = image_values("services", "agent") | {"operator": {"namespaces": [namespace]}}

    def helm(self, *arguments: str) -> str:
        """Runs helm in the namespace; raises HelmFailed, with what the cluster knows."""
        try:
            return helm(
                *arguments, f"--namespace={self.namespace}", environ={"KUBECONFIG": str(self.cluster.kubeconfig)}
            )
        except HelmFailed as error:
            raise HelmFailed(f"{error}\n{self.state()}") from error

    def install(self, **changes: Any) -> str:
        """Installs it, or upgrades what is installed, and returns when all of it is ready."""
        self.values |= changes
        # Most tests look at jobs and services together; with "" jobs have a namespace of their own, as by default.
        jobs = {"namespace": self.namespace} | self.values.get("jobs", {})
        given = _given(self.folder, self.values | {"jobs": jobs})
        options = ["--install", "--wait", f"--timeout={int(PATIENCE_S * 2)}s", *given]
        return self.helm("upgrade", self.name, str(CHART), *options)

    def uninstall(self) -> str:
        """Removes it; returns what helm printed."""
        return self.helm("uninstall", self.name, "--wait", f"--timeout={int(PATIENCE_S)}s")

    def provide_volumes(self) -> None:
        """Makes the volumes that its claims will ask for, each a folder that both nodes see."""
        for service in ("scheduler", "metrics", "artifacts"):
            folder = self.folder / service
            folder.mkdir()
            folder.chmod(0o777)  # the testbed's volumes take no owner from a pod
            claim = {"name": f"home-yard-trainyard-{service}-0", "namespace": self.namespace}
            spec = {
                "capacity": {"storage": "100Gi"},
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": self.namespace,
                "claimRef": claim,
                "hostPath": {"path": str(folder), "type": "Directory"},
            }
            metadata = {"name": f"{self.namespace}-{service}", "labels": {"test": self.namespace}}
            self.cluster.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": spec})

    def remove_volumes(self) -> None:
        """Removes them again."""
        self.cluster.kubectl("delete", "persistentvolumes", f"--selector=test={self.namespace}", "--wait=false")

    def kubectl(self, *arguments: str, check: bool = True, input: str | None = None) -> str:
        return self.cluster.kubectl(f"--namespace={self.namespace}", *arguments, check=check, input=input)

    def objects(self, kinds: str, *options: str) -> list[dict[str, Any]]:
        """The objects of some kinds, with commas between them, in the namespace."""
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", kinds, *options, "--output=json"))["items"]
        return found

    def named(self, kinds: str) -> set[str]:
        """`kind/name` of each object of some kinds."""
        return {f"{each['kind']}/{each['metadata']['name']}" for each in self.objects(kinds)}

    def load_images(self) -> None:
        """Gives the nodes the images that they lack."""
        known = self.cluster.images()
        for name in ("services", "agent"):
            if not all(images.reference(name) in found for found in known.values()):
                self.cluster.load_image(images.archive(name))

    def cluster_objects(self) -> list[str]:
        """Names of what it made outside of namespaces."""
        found = self.cluster.kubectl("get", _OUTSIDE, "--output=name").split()
        return [name for name in found if name.partition("/")[2].startswith(f"{self.namespace}-")]

    def release_resources(self) -> None:
        """Takes finalizers off resources, which keep the namespace when a test fails in the middle."""
        for each in self.objects("trainingjobs"):
            name = each["metadata"]["name"]
            self.kubectl("patch", "trainingjob", name, "--type=merge", '--patch={"metadata":{"finalizers":null}}')

    def remove_cluster_objects(self) -> None:
        """Removes those, which are left when a test fails in the middle."""
        if left := self.cluster_objects():
            self.cluster.kubectl("delete", "--ignore-not-found", *left)

    def secrets(self) -> dict[str, dict[str, str]]:
        """Content of the secrets that the installation made."""
        return {
            each["metadata"]["name"]: each.get("data", {})
            for each in self.objects("secrets")
            if not each["type"].startswith("helm.sh/")
        }

    def state(self) -> str:
        """What there is to know after a failure."""
        shown = [self.kubectl("get", "pods,jobs,pvc", "--output=wide", check=False)]
        shown.append(self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False)[-4000:])
        for pod in json.loads(self.kubectl("get", "pods", "--output=json", check=False) or '{"items":[]}')["items"]:
            name = pod["metadata"]["name"]
            shown.append(f"== {name}\n{self.kubectl('logs', name, '--tail=20', '--all-containers', check=False)}")
        return "\n".join(shown)

    @contextmanager
    def reached(self, token: str = "") -> Iterator[dict[str, str]]:
        """The environment of a user of the yard, while a port is forwarded to it, as the chart's notes say."""
        token = token or base64.b64decode(self.secrets()["yard-trainyard-token"]["token"]).decode()
        ca_file = self.folder / "ca.crt"
        root = self.kubectl("get", "configmap", "yard-trainyard-ca", "--output=json")
        ca_file.write_text(json.loads(root)["data"]["ca.crt"])
        with self._forwarded("service/yard-trainyard-gateway", 443) as port:
            yield {
                "TRAINYARD_ENDPOINT": f"localhost:{port}",
                "TRAINYARD_CA_FILE": str(ca_file),
                "TRAINYARD_TOKEN": token,
            }

    def yard(self, *arguments: str | Path) -> str:
        """`yard ARGUMENTS...` as a user; returns what it printed."""
        with self.reached() as user:
            environ = os.environ | user | {"TRAINYARD_HOME": str(self.folder / "user")}
            command = [str(Path(sys.executable).with_name("yard")), *map(str, arguments)]
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=2 * PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def client(self, token: str = "") -> Iterator[Client]:
        """A client of the yard."""
        with (
            self.reached(token) as user,
            Client(
                user["TRAINYARD_ENDPOINT"], token=user["TRAINYARD_TOKEN"], ca_file=Path(user["TRAINYARD_CA_FILE"])
            ) as client,
        ):
            yield client

    @contextmanager
    def _forwarded(self, what: str, port: int) -> Iterator[int]:
        command = [
            str(binaries.kubernetes.program("kubectl")),
            f"--kubeconfig={self.cluster.kubeconfig}",
            f"--namespace={self.namespace}",
            "port-forward",
            what,
            f":{port}",
        ]
        log = self.folder / "port-forward.log"
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            yield _port_in(log, process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def _port_in(log: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"Forwarding from 127\.0\.0\.1:(\d+)", log.read_text()):
            return int(found[1])
        time.sleep(0.05)
    raise AssertionError(f"no port was forwarded:\n{log.read_text()}")


def _given(folder: Path, values: Values) -> list[str]:
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(dict(values)))
    return [f"--values={path}"]
