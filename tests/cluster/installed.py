"""Installations of the chart that train, one for all tests of a file, and a job that proves what is stored of it.

The services and the agent come from their images; the workers' system, Python and PyTorch are this machine's own.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from trainyard.errors import YardError

from scripts.testbed.cluster import locks
from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.cluster.images import BUSYBOX
from scripts.testbed.patience import PATIENCE_S
from tests.checker import Api, Stored, differences
from tests.cluster.release import Release
from tests.cluster.yards import machine_template
from tests.conftest import wait_until
from tests.faults.trainer import evidence

# A pod that dies takes along what it had not delivered. What other nodes than the first logged before a checkpoint of
# one file is not in its cut, so that a resumed series of theirs begins at the checkpoint.
_GOES_WITH_A_POD = re.compile(r"(attempt 1 rank \d|stitched rank 1) .*: step \d+ missing")

SERVICES = ("scheduler", "launcher", "metrics", "artifacts", "redis")
TRAINER = Path(evidence.__file__).parent
_DIARIES = "/diaries"


@contextmanager
def installation(cluster: Cluster, folder: Path, **values: Any) -> Iterator[Release]:
    """A small installation in a namespace of its own; its jobs may mount folders of the nodes."""
    namespace = f"trains-{secrets.token_hex(4)}"
    folder.chmod(0o755)
    release = Release(cluster, namespace, folder)
    try:
        with locks.sharing(cluster.layout):
            _install(release, values)
        yield release
    finally:
        with locks.sharing(cluster.layout):
            _remove(release)


def _install(release: Release, values: Mapping[str, Any]) -> None:
    release.cluster.kubectl("create", "namespace", release.namespace)
    release.cluster.wait_for_service_account(release.namespace)
    release.load_images()
    release.provide_volumes()
    repository, _, tag = BUSYBOX.rpartition(":")
    given = {
        "storage": {"className": release.namespace},
        "workerImage": {"repository": repository, "tag": tag},
        "jobs": {"podTemplate": machine_template(), "hostPaths": True},
        "gateway": {"replicas": 1},
        "launcher": {"env": {"TRAINYARD_LAUNCHER_AGENT_CPU": 0.05}},
    }
    release.install(**(given | dict(values)))


def _remove(release: Release) -> None:
    release.kubectl("delete", "jobs", "--all", "--wait=false", check=False)
    release.release_resources()
    release.remove_cluster_objects()
    release.remove_volumes()
    release.cluster.kubectl("delete", "namespace", release.namespace, "--wait=false")


def settle(release: Release) -> None:
    """Waits until every service answers: a test of another file may have switched a node off."""
    for kind in ("deployments", "statefulsets"):
        release.kubectl("rollout", "status", kind, *_SELECTOR, f"--timeout={int(PATIENCE_S)}s")
    with release.client() as client:

        def answers() -> bool:
            try:
                client.artifacts()
                any(client.runs())
                return bool(client.pools())
            except YardError:
                return False

        wait_until(answers, "the services to answer")


_SELECTOR = ["--selector=app.kubernetes.io/instance=yard"]


def pods_of(release: Release, job_id: str) -> list[dict[str, Any]]:
    """The pods of a job, by node."""
    found = release.objects("pods", f"--selector=trainyard.dev/job-id={job_id}")
    return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))


def await_pods(release: Release, job_id: str, phase: str = "") -> list[dict[str, Any]]:
    """Returns the two pods of a job when both are there, in a phase when one is given."""
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found[:] = pods_of(release, job_id)
        return len(found) == 2 and all(phase in ("", pod["status"]["phase"]) for pod in found)

    try:
        wait_until(there, f"two pods {phase}")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{release.yard('explain', job_id)}\n{release.state()}") from error
    return found


def lives(pods: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Of each pod: which one it is, and how often its containers were started again."""
    return [
        (pod["metadata"]["uid"], sum(each["restartCount"] for each in pod["status"].get("containerStatuses", [])))
        for pod in pods
    ]


def but_for_a_dead_pod(differences: list[str]) -> list[str]:
    """Differences that the death of the first attempt's pods does not explain."""
    return [each for each in differences if not _GOES_WITH_A_POD.fullmatch(each)]


def applied(release: Release, file: Path) -> str:
    """`kubectl apply` of a job file; returns the id of the job that the operator makes of it."""
    document = YAML(typ="safe").load(file.read_text())
    name = document["metadata"]["name"]
    release.kubectl("apply", f"--filename={file}")
    release.kubectl(
        *("wait", "--for=condition=Accepted", f"trainingjob/{name}", f"--timeout={int(PATIENCE_S)}s"),
    )
    return str(json.loads(release.kubectl("get", f"trainingjob/{name}", "--output=json"))["status"]["jobId"])


@dataclass(frozen=True)
class Training:
    """A job of two pods whose workers keep diaries, in a folder that every node sees, until they are told to end.

    Attributes:
        folder: of the diaries.
    """

    release: Release
    job_id: str
    name: str
    folder: Path
    seed: int

    @classmethod
    def start(cls, release: Release, folder: Path, name: str, seed: int) -> Training:
        """Submits it by the SDK."""
        code, diaries = folder / "code", folder / "diaries"
        shutil.copytree(TRAINER, code, ignore=shutil.ignore_patterns("__pycache__"))
        diaries.mkdir()
        diaries.chmod(0o777)
        spec = {
            "runtime": "torchrun",
            "command": ["python", "train.py"],
            "code": {"path": "."},
            "nodes": 2,
            "resources": {"cpu": "100m", "memory": "128Mi"},
            "env": {"EVIDENCE": _DIARIES, "SEED": str(seed), "PAUSE_S": "0.01"},
            "checkpoints": {"path": "checkpoints", "pattern": "step-{step}.bin"},
            "outputs": [{"path": "exports", "artifact": f"{name}-model"}],
            "retries": {"limit": 3, "backoff": "100ms"},
            "gracePeriod": "5s",
            "kubernetes": {"volumes": [{"name": "diaries", "mountPath": _DIARIES, "hostPath": str(diaries)}]},
        }
        file = code / "job.yaml"
        header = {"apiVersion": "trainyard.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}}
        file.write_text(json.dumps(header | {"spec": spec}))
        with release.client() as client:
            return cls(release, client.submit(file).id, name, diaries, seed)

    @property
    def steps(self) -> int:
        """How many steps all workers came to."""
        return evidence.steps_told(self.folder)

    def advance(self, steps: int) -> None:
        """Waits until the workers did this many steps more: the proof that training goes on."""
        goal = self.steps + steps
        wait_until(lambda: self.steps >= goal, f"{steps} further steps of training\n{self.release.state()}")

    def told(self) -> list[evidence.Told]:
        """The diaries so far."""
        return list(evidence.read_diaries(self.folder))

    def pods(self) -> list[dict[str, Any]]:
        return pods_of(self.release, self.job_id)

    def await_checkpoint(self) -> None:
        """Returns when one is stored."""
        with self.release.client() as client:
            wait_until(lambda: any(client.versions(kind="checkpoint", job=self.job_id)), "a checkpoint")

    def finish(self) -> tuple[list[str], list[str]]:
        """Tells the workers that it is enough, and waits for the end.

        Returns:
            Why each attempt ended, and what differs between what was sent and what is stored.
        """
        (self.folder / evidence.ENOUGH).touch()
        with self.release.client() as client:
            ended = client.job(self.job_id).wait(2 * PATIENCE_S, check=False)
        reasons = [attempt.exit.reason for attempt in ended.attempts]
        return reasons, differences(self.seed, self.told(), self._stored())

    def _stored(self) -> Stored:
        with self.release.reached() as user:
            ca_file = Path(user["TRAINYARD_CA_FILE"])
            with Api(user["TRAINYARD_ENDPOINT"], user["TRAINYARD_TOKEN"], ca_file) as api:
                return api.stored(self.job_id, f"{self.name}-model")
