"""A user's machine and a yard that the chart installed: `yard` reaches it by itself, and says what is in the way."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from trainyard.client import Client

from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S
from tests.cluster.release import Release, image_values, rendered
from tests.conftest import REPOSITORY, YARD, YardHome, wait_until

pytestmark = pytest.mark.timeout(6 * PATIENCE_S)

GUIDE = (REPOSITORY / "docs" / "guides" / "kubectl.md").read_text()
ROLE: dict[str, Any] = yaml.safe_load(re.findall(r"```yaml\n(apiVersion: rbac.*?)```", GUIDE, re.DOTALL)[0])
GATEWAY = "--selector=app.kubernetes.io/component=gateway"
TRAIN = """
import itertools, os, time

for number in itertools.count():
    print("line", number, flush=True)
    if os.path.exists("enough"):
        break
    time.sleep(0.05)
"""


class User(YardHome):
    """Somebody with `yard` and a kubeconfig, who may do on the cluster what the guide says and nothing else."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.namespace = namespace
        self.cluster = cluster
        self.kubeconfig = folder / "kubeconfig"
        super().__init__(folder / "user", {"KUBECONFIG": str(self.kubeconfig)})
        self._kubectl("create", "serviceaccount", "user")
        self._write(self._kubectl("create", "token", "user").strip())

    def _kubectl(self, *arguments: str, input: str | None = None) -> str:
        return self.cluster.kubectl(f"--namespace={self.namespace}", *arguments, input=input)

    def _write(self, token: str) -> None:
        config = json.loads(self.cluster.kubeconfig.read_text())
        config["users"] = [{"name": "user", "user": {"token": token}}]
        config["contexts"][0]["context"]["user"] = "user"
        self.kubeconfig.write_text(json.dumps(config))

    def log_out(self) -> None:
        self._write("that-has-ended")

    def allow(self, *rules: dict[str, Any]) -> None:
        """Gives it a role with these rules."""
        self._kubectl("apply", "--filename=-", input=json.dumps(ROLE | {"rules": rules}))
        role = ROLE["metadata"]["name"]
        binding = ("create", "rolebinding", "user", f"--role={role}", f"--serviceaccount={self.namespace}:user")
        self._kubectl("apply", "--filename=-", input=self._kubectl(*binding, "--dry-run=client", "--output=json"))

    def does(self, *arguments: str | Path) -> str:
        """What a command prints that does what it is told."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def user(cluster: Cluster, cluster_namespace: str, tmp_path: Path) -> Iterator[User]:
    found = User(cluster, cluster_namespace, tmp_path)
    yield found
    found.assert_nothing_left()


@pytest.fixture
def release(cluster: Cluster, cluster_namespace: str, tmp_path: Path) -> Iterator[Release]:
    """A yard that keeps nothing, with an address of its own on a node."""
    found = Release(cluster, cluster_namespace, tmp_path)
    found.load_images()
    found.install(
        storage={"kind": "emptyDir"},
        gateway={"replicas": 1, "service": {"type": "NodePort"}},
        tls={"extraHosts": [cluster.layout.address("node-1")]},
    )
    yield found
    found.kubectl("delete", "jobs", "--all", "--wait=false", check=False)
    found.remove_cluster_objects()


class Following:
    """A command that follows a job, and what it has printed so far."""

    def __init__(self, user: User, log: Path, *arguments: str | Path) -> None:
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [YARD, *arguments], env=user.environ, stdout=output, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def lines(self, rank: int) -> list[int]:
        return numbers(rank, self._log.read_text())

    def goes_on(self) -> None:
        """Waits until it prints further lines of both ranks."""
        seen = [len(self.lines(rank)) for rank in (0, 1)]
        wait_until(
            lambda: all(len(self.lines(rank)) > seen[rank] for rank in (0, 1)),
            f"further lines in\n{self._log.read_text()[-2000:]}",
        )

    def end(self) -> int:
        """Its exit code."""
        return self._process.wait(PATIENCE_S)


def project(folder: Path) -> Path:
    """A folder with code and a job file, as a user has it; two nodes of a worker."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    image = image_values("services")["image"]
    spec = {
        "runtime": "process",
        "command": ["python3", "train.py"],
        "code": {"path": "."},
        "image": f"{image['repository']}:{image['tag']}",
        "kubernetes": {"pullPolicy": "Never"},
        "nodes": 2,
        "resources": {"cpu": "100m", "memory": "64Mi"},
    }
    header = {"apiVersion": "trainyard.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "synced"}}
    file = folder / "job.yaml"
    file.write_text(json.dumps(header | {"spec": spec}))
    return file


def replace_gateway(release: Release) -> None:
    """Takes the pod away that everything goes through; returns when it is gone."""
    release.kubectl("delete", "pod", GATEWAY, "--grace-period=1", f"--timeout={int(PATIENCE_S)}s")


def add_by_address(user: User, release: Release, folder: Path) -> None:
    """Makes a context of the address that the gateway has on a node."""
    (service,) = release.objects("services", GATEWAY)
    address = f"{release.cluster.layout.address('node-1')}:{service['spec']['ports'][0]['nodePort']}"
    token, ca_file = folder / "token", folder / "ca.crt"
    token.write_text(base64.b64decode(release.secrets()["yard-trainyard-token"]["token"]).decode())
    (root,) = release.objects("configmaps", "--field-selector=metadata.name=yard-trainyard-ca")
    ca_file.write_text(root["data"]["ca.crt"])
    user.does("context", "add", "direct", "--endpoint", address, "--ca-file", ca_file, "--token-file", token)


def numbers(rank: int, text: str) -> list[int]:
    """Of the lines that a rank wrote."""
    return [int(number) for number in re.findall(rf"^\[rank {rank}\] line (\d+)$", text, re.MULTILINE)]


def test_a_user_runs_follows_and_enters_a_job_without_an_image_of_its_code(
    user: User, release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user.allow(*ROLE["rules"])
    user.does("context", "add", "lab", "--release", release.name, "--namespace", release.namespace)
    user.does("context", "use", "lab")

    with ExitStack() as commands:
        ran = commands.enter_context(Following(user, tmp_path / "run.log", "run", project(tmp_path / "project")))
        ran.goes_on()
        followed = commands.enter_context(Following(user, tmp_path / "logs.log", "logs", "-f", "synced"))
        followed.goes_on()
        replace_gateway(release)
        followed.goes_on()
        ran.goes_on()
        ending = "echo $TRAINYARD_RANK; touch enough; exit 7"
        entered = user.run("shell", "synced", "--rank", "1", "--", "sh", "-c", ending)
        assert (entered.stdout, entered.returncode) == ("1\n", 7)
        user.does("shell", "synced", "--", "touch", "enough")
        assert (ran.end(), followed.end()) == (0, 0)

    add_by_address(user, release, tmp_path)
    written = user.does("logs", "synced")
    for rank in (0, 1):
        lines = numbers(rank, written)
        assert lines == list(range(len(lines)))
        assert followed.lines(rank) == lines
        assert ran.lines(rank) == lines

    for name in ("TRAINYARD_HOME", "KUBECONFIG"):
        monkeypatch.setenv(name, user.environ[name])
    for context in ("lab", "direct"):
        monkeypatch.setenv("TRAINYARD_CONTEXT", context)
        with Client() as client:
            assert client.job("synced").status().attempts[0].exit.reason == "Completed"


def test_what_is_in_the_way_is_said_with_what_to_do(user: User, cluster: Cluster, cluster_namespace: str) -> None:
    add = ("context", "add", "lab", "--release", "yard", "--namespace", cluster_namespace)
    user.does(*add)
    user.does("context", "use", "lab")

    def told(code: int, *words: str) -> None:
        done = user.run("jobs")
        assert done.returncode == code, done.stdout + done.stderr
        for each in words:
            assert each in done.stderr

    told(5, "the cluster does not let you list services there", f"a role in namespace {cluster_namespace}")
    user.allow(*ROLE["rules"])
    told(3, f"no release yard in namespace {cluster_namespace}", "helm list --all-namespaces")
    cluster.apply(*installed_in_part(cluster_namespace))
    told(4, "the gateway is not ready: it has no pods", f"kubectl --namespace {cluster_namespace} get pods")
    user.log_out()
    told(5, "the cluster does not know you", "log in to it")
    user.does(*add, "--kube-context", "elsewhere")
    told(3, "Expected object with name elsewhere", "kubectl config get-contexts")


def installed_in_part(namespace: str) -> list[dict[str, Any]]:
    """Of what the chart makes, the gateway's Service alone."""
    found = rendered({"fullnameOverride": "yard"})
    (service,) = [each for each in found if each["kind"] == "Service" and each["metadata"]["name"] == "yard-gateway"]
    service["metadata"]["namespace"] = namespace
    return [service]
