"""A job that trains while its yard suffers, and what it sent beside what is stored."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from trainyard.client import Client
from trainyard.home import read_endpoint, token, write_endpoint
from trainyard_protos.v1 import scheduler_pb2

from scripts.testbed.patience import PATIENCE_S
from tests.checker import Api, assert_whole
from tests.conftest import YardHome, wait_until
from tests.faults.relay import Relay
from tests.faults.trainer import evidence

TRAINER = Path(__file__).with_name("trainer")
SPEC = """\
apiVersion: trainyard.dev/v1alpha1
kind: TrainingJob
metadata: {{name: {name}}}
spec:
  runtime: torchrun
  command: [python, train.py]
  code: {{path: .}}
  nodes: {nodes}
  workersPerNode: {workers}
  resources: {{cpu: 100m, memory: 128Mi}}
  env: {{EVIDENCE: {folder}, SEED: "{seed}", PAUSE_S: "{pause_s}"}}
  checkpoints: {{path: checkpoints, pattern: "step-{{step}}.bin"}}
  outputs: [{{path: exports, artifact: {name}-model}}]
  retries: {{limit: 50, backoff: 100ms}}
  gracePeriod: 5s
"""


@dataclass(frozen=True)
class Training:
    """One job in `home` whose workers keep diaries in `folder`.

    Attributes:
        relay: what agents go through; a test itself never does.
    """

    home: YardHome
    job_id: str
    name: str
    folder: Path
    seed: int
    relay: Relay | None = None

    @classmethod
    def start(
        cls,
        home: YardHome,
        folder: Path,
        *,
        seed: int = 1,
        nodes: int = 1,
        workers: int = 2,
        pause_s: float = 0.001,
        name: str = "training",
        relay: Relay | None = None,
    ) -> Training:
        """Submits the job. It goes on until `finish`."""
        code, diaries = folder / f"{name}-code", folder / f"{name}-diaries"
        shutil.copytree(TRAINER, code, ignore=shutil.ignore_patterns("__pycache__"))
        diaries.mkdir()
        spec = SPEC.format(name=name, nodes=nodes, workers=workers, folder=diaries, seed=seed, pause_s=pause_s)
        (code / "job.yaml").write_text(spec)
        training = cls(home, "", name, diaries, seed, relay)
        with training.client() as client:
            return replace(training, job_id=client.submit(code / "job.yaml").id)

    @property
    def endpoint(self) -> str:
        """Where the yard itself is."""
        return self.relay.target if self.relay else endpoint_of(self.home)

    def client(self) -> Client:
        return Client(self.endpoint, token=token(self.home.folder))

    @property
    def steps(self) -> int:
        """How many steps all workers came to."""
        return evidence.steps_told(self.folder)

    def advance(self, steps: int) -> None:
        """Waits until the workers did this many steps more: the proof that training goes on."""
        goal = self.steps + steps
        wait_until(lambda: self.steps >= goal, f"{steps} further steps of training (seed {self.seed})")

    def trains_for(self, seconds: float) -> None:
        """Lets time pass, in which every second sees steps of training."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.advance(1)
            time.sleep(1)

    def status(self) -> scheduler_pb2.Job:
        with self.client() as client:
            return client.job(self.job_id).status()

    def api(self) -> Api:
        return Api(self.endpoint, token(self.home.folder))

    def checkpoints(self) -> list[int]:
        """Steps of the stored checkpoints."""
        with self.client() as client:
            return sorted(version.checkpoint.step for version in client.versions(kind="checkpoint", job=self.job_id))

    def stored_steps(self, series: str = evidence.TRAIN_NAMES[0]) -> int:
        """How many points of a series are stored, of all ranks together."""
        with self.api() as api:
            return api.count(self.job_id, series)

    def finish(self) -> scheduler_pb2.Job:
        """Tells the workers that it is enough; waits for the job's success; checks everything.

        Raises:
            AssertionError: what is stored is not what was sent, or the job did not succeed.
        """
        (self.folder / evidence.ENOUGH).touch()
        with self.client() as client:
            ended = client.job(self.job_id).wait(PATIENCE_S, check=False)
        assert ended.state == scheduler_pb2.JOB_STATE_SUCCEEDED, (
            self.seed,
            ended.reason,
            ended.message,
            self.home.log(),
        )
        with self.api() as stored:
            assert_whole(stored, self.job_id, self.folder, self.seed, f"{self.name}-model")
        return ended


def endpoint_of(home: YardHome) -> str:
    """Of the yard that serves a home."""
    yard = read_endpoint(home.folder)
    assert yard is not None, f"no yard runs: {home.log()}"
    return yard.endpoint


def yard_process(home: YardHome) -> psutil.Process:
    """The process that serves a home: scheduler, launcher, metrics and artifacts."""
    yard = read_endpoint(home.folder)
    assert yard is not None, f"no yard runs: {home.log()}"
    return psutil.Process(yard.pid)


@contextmanager
def agents_go_through(home: YardHome) -> Iterator[Relay]:
    """Agents of a home find a relay where the yard should be, until the yard is started again."""
    yard = read_endpoint(home.folder)
    assert yard is not None
    with Relay(yard.endpoint) as relay:
        write_endpoint(home.folder, replace(yard, endpoint=relay.endpoint))
        yield relay
        write_endpoint(home.folder, yard)


def memory_bytes(*processes: psutil.Process) -> int:
    """What the processes hold in memory together."""
    return sum(process.memory_info().rss for process in processes)
