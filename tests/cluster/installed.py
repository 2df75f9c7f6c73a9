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
from tests.checker import Api, differences
from tests.cluster.release import Release
from tests.cluster.yards import machine_template
from tests.conftest import wait_until
from tests.faults.trainer import evidence

# A pod that dies takes along what it had not delivered. What the first node had logged before a checkpoint is stored
# with it; what the other one had not delivered by then is in no attempt's series, nor in the stitched ones.
_GOES_WITH_A_POD = re.compile(r"(?:attempt 1 rank \d|stitched rank 1) .*: step (\d+) missing")

SERVICES = ("scheduler", "launcher", "metrics", "artifacts", "redis")
TRAINER = Path(evidence.__file__).parent
_DIARIES = "/diaries"


@contextmanager
def installation(cluster: Cluster, folder: Path, **values: Any) -> Iterator[Release]:
    """A small installation in a namespace of its own; its jobs may mount folders of the nodes.

    Args:
        values: of the chart; those of one part are added to what is set for it here.
    """
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
    release.cluster.create_namespace(release.namespace)
    release.cluster.wait_for_service_account(release.namespace)
    release.load_images()
    release.provide_volumes()
    repository, _, tag = BUSYBOX.rpartition(":")
    given = {
        "storage": {"className": release.namespace},
        "workerImage": {"repository": repository, "tag": tag},
        "jobs": {"podTemplate": machine_template(), "hostPaths": True, "podSecurity": "privileged"},
        "gateway": {"replicas": 1},
        "operator": release.values["operator"],
    }
    release.install(**(given | {part: given.get(part, {}) | value for part, value in values.items()}))


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


def pods_of(release: Release, job_id: str, attempt: int) -> list[dict[str, Any]]:
    """The pods of a job's attempt, by node."""
    found = release.objects("pods", f"--selector=trainyard.dev/job-id={job_id},trainyard.dev/fence={attempt}")
    return sorted(found, key=lambda pod: int(pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]))


def await_pods(release: Release, job_id: str, phase: str = "", attempt: int = 1) -> list[dict[str, Any]]:
    """Returns the two pods of an attempt when both are there, in a phase when one is given."""
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found[:] = pods_of(release, job_id, attempt)
        return len(found) == 2 and all(phase in ("", pod["status"]["phase"]) for pod in found)

    with explained(release, job_id):
        wait_until(there, f"two pods {phase}")
    return found


@contextmanager
def explained(release: Release, job_id: str) -> Iterator[None]:
    """Adds to a failure what the yard and the cluster know."""
    try:
        yield
    except (AssertionError, TimeoutError) as error:
        raise AssertionError(f"{error}\n{release.yard('explain', job_id)}\n{release.state()}") from error


def lives(pods: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Of each pod: which one it is, and how often its containers were started again."""
    return [
        (pod["metadata"]["uid"], sum(each["restartCount"] for each in pod["status"].get("containerStatuses", [])))
        for pod in pods
    ]


def but_for_a_dead_pod(differences: list[str], stored: int) -> list[str]:
    """Differences that the death of the first attempt's pods does not explain.

    Args:
        stored: the step up to which everything was stored before they died.
    """
    return [each for each in differences if _missing(each) <= stored]


def _missing(difference: str) -> int:
    """The step that is missing, where that can be explained; 0 for any other difference."""
    found = _GOES_WITH_A_POD.fullmatch(difference)
    return int(found[1]) if found else 0


def applied(release: Release, file: Path) -> str:
    """`kubectl apply` of a job file; returns the id of the job that the operator makes of it."""
    document = YAML(typ="safe").load(file.read_text())
    name = document["metadata"]["name"]
    release.kubectl("apply", f"--filename={file}")
    release.kubectl(
        *("wait", "--for=condition=Accepted", f"trainingjob/{name}", f"--timeout={int(PATIENCE_S)}s"),
    )
    return str(json.loads(release.kubectl("get", f"trainingjob/{name}", "--output=json"))["status"]["jobId"])


def await_described(release: Release, name: str, *words: str) -> None:
    """Waits until `kubectl describe` says all this of a job."""
    said = [""]

    def told() -> bool:
        said[0] = release.kubectl("describe", "trainingjob", name)
        return all(word in said[0] for word in words)

    try:
        wait_until(told, f"{name} to say {words}")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{said[0]}\n{release.state()}") from error


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
        """Submits it by kubectl."""
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
            "kubernetes": {
                "volumes": [{"name": "diaries", "mountPath": _DIARIES, "hostPath": str(diaries)}],
                "topology": "spread",
            },
        }
        header = {"apiVersion": "trainyard.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}}
        file, rendered = code / "job.yaml", folder / "rendered.yaml"
        file.write_text(json.dumps(header | {"spec": spec}))
        rendered.write_text(release.yard("render", file))
        return cls(release, applied(release, rendered), name, diaries, seed)

    @property
    def steps(self) -> int:
        """How many steps all workers came to."""
        return evidence.steps_told(self.folder)

    def advance(self, steps: int) -> None:
        """Waits until the workers did this many steps more: the proof that training goes on."""
        goal = self.steps + steps
        with explained(self.release, self.job_id):
            wait_until(lambda: self.steps >= goal, f"{steps} further steps of training")

    def told(self) -> list[evidence.Told]:
        """The diaries so far."""
        return list(evidence.read_diaries(self.folder))

    def pods(self, attempt: int = 1) -> list[dict[str, Any]]:
        return await_pods(self.release, self.job_id, attempt=attempt)

    def await_attempt(self, number: int) -> None:
        """Returns when both workers of an attempt train."""
        with explained(self.release, self.job_id):
            wait_until(lambda: self._training(number) == 2, f"attempt {number}")

    def _training(self, attempt: int) -> int:
        return sum(each.attempt == attempt and bool(each.steps) for each in self.told())

    def first_step(self, attempt: int) -> int:
        """Of both workers."""
        return min(step for each in self.told() if each.attempt == attempt for step in each.steps)

    def await_checkpoint(self) -> int:
        """Returns a step: its checkpoint is stored, and so is all that both workers logged until then."""
        with explained(self.release, self.job_id), self._api() as api:
            wait_until(lambda: api.checkpoints(self.job_id), "a checkpoint")
            step = min(step for step, _ in api.checkpoints(self.job_id))
            wait_until(lambda: self._is_stored(api, step), f"what was logged until step {step}")
        return step

    def _is_stored(self, api: Api, step: int) -> bool:
        """Whether all that the first attempt logged until then is."""
        found = differences(self.seed, self.told(), api.records(self.job_id), over=False)
        return not any(0 < _missing(each) <= step for each in found)

    def finish(self) -> tuple[list[str], list[str]]:
        """Tells the workers that it is enough, and waits for the end.

        Returns:
            Why each attempt ended, and what differs between what was sent and what is stored.
        """
        (self.folder / evidence.ENOUGH).touch()
        with self.release.client() as client:
            ended = client.job(self.job_id).wait(2 * PATIENCE_S, check=False)
        reasons = [attempt.exit.reason for attempt in ended.attempts]
        with self._api() as api:
            return reasons, differences(self.seed, self.told(), api.stored(self.job_id, f"{self.name}-model"))

    @contextmanager
    def _api(self) -> Iterator[Api]:
        with (
            self.release.reached() as user,
            Api(user["TRAINYARD_ENDPOINT"], user["TRAINYARD_TOKEN"], Path(user["TRAINYARD_CA_FILE"])) as api,
        ):
            yield api
