"""A real yard for tests that cross services: its own home, its own processes, and none of them left at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from trainyard.client import Client
from trainyard.home import read_endpoint

from scripts.testbed.patience import PATIENCE_S
from scripts.testbed.yard import SplitYard, Stores

YARD = Path(sys.executable).with_name("yard")
REPOSITORY = Path(__file__).parents[1]


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> object:
    """The first true value of a condition that a process outside of this test's reach brings about."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {timeout_s} s for {what}")


class YardHome:
    """One TRAINYARD_HOME and the processes that belong to it."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.environ = os.environ | {"TRAINYARD_HOME": str(folder)} | dict(settings or {})

    def run(self, *arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
        """`yard ARGUMENTS...`, to its end."""
        return subprocess.run(
            [YARD, *arguments], env=self.environ, capture_output=True, text=True, timeout=PATIENCE_S, **options
        )

    def spawn(self, *arguments: str | Path, **options: object) -> subprocess.Popen[str]:
        """`yard ARGUMENTS...`, running, in a session of its own as a terminal would have it."""
        return subprocess.Popen(
            [YARD, *arguments],
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **options,
        )

    def up(self) -> None:
        result = self.run("up")
        assert result.returncode == 0, result.stdout + result.stderr + self.log()

    def down(self) -> None:
        result = self.run("down", "-y")
        assert result.returncode == 0, result.stdout + result.stderr + self.log()

    def kill(self) -> None:
        """SIGKILL to the yard: scheduler, launcher, metrics and artifacts at once."""
        yard = read_endpoint(self.folder)
        assert yard is not None
        process = psutil.Process(yard.pid)
        process.kill()
        wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "the yard to die")

    def client(self) -> Client:
        yard = read_endpoint(self.folder)
        assert yard is not None, f"no yard runs: {self.log()}"
        return Client(yard.endpoint, token=(self.folder / "token").read_text().strip())

    def log(self) -> str:
        path = self.folder / "yard.log"
        return path.read_text()[-5000:] if path.exists() else ""

    def packs(self) -> list[Path]:
        """The files that hold chunks of artifacts, the newest last."""
        return _files_by_age(self.folder / "packs")

    def processes(self) -> list[psutil.Process]:
        """Every process that has this home in its environment, in whatever session it hides."""
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.pid != os.getpid()
                    and process.environ().get("TRAINYARD_HOME") == str(self.folder)
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def workers(self, script: str = "train.py") -> list[psutil.Process]:
        """The workers that run now."""
        return [process for process in self.processes() if script in " ".join(_command(process)) and is_worker(process)]

    def agents(self) -> list[psutil.Process]:
        return [process for process in self.processes() if "trainyard.agent" in _command(process)]

    def assert_nothing_left(self) -> None:
        wait_until(lambda: not self.processes(), f"the end of {[_command(p) for p in self.processes()]}")

    def sweep(self) -> None:
        """Ends what a failed test left behind."""
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue


class SplitHome(YardHome):
    """The same, of a yard whose services run apart; `split` has each of them by its name, to be killed and started."""

    def __init__(self, folder: Path, settings: Mapping[str, str], stores: Stores, schedulers: int = 1) -> None:
        super().__init__(folder, settings)
        self.split = SplitYard(folder, stores, settings, schedulers=schedulers)

    def up(self) -> None:
        self.split.start()

    def down(self) -> None:
        """As `yard down`: what is active is cancelled first."""
        with self.client() as client:
            jobs = [client.job(job.id) for job in client.list(states_in=ACTIVE, include_owned=True)]
            for job in jobs:
                job.cancel()
            for job in jobs:
                job.wait(PATIENCE_S, check=False)
        self.split.stop()

    def kill(self) -> None:
        self.split.kill()

    def packs(self) -> list[Path]:
        return _files_by_age(self.split.stores.folder)

    def log(self) -> str:
        return "\n".join(f"--- {name}\n{server.tail()}" for name, server in self.split.servers().items())

    def sweep(self) -> None:
        self.split.stop()
        super().sweep()


def _files_by_age(folder: Path) -> list[Path]:
    return sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_mtime_ns)


ACTIVE = ("queued", "starting", "running", "stopping", "finalizing")


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def is_worker(process: psutil.Process) -> bool:
    try:
        return "RANK" in process.environ() or "TRAINYARD_RANK" in process.environ()
    except psutil.Error:
        return False


@pytest.fixture(scope="module")
def mode() -> str:
    """How the yards of a module run: `embedded`, or `split` into services that run apart. A module, or a folder, whose
    tests hold for both has a fixture of this name with both as its parameters."""
    return "embedded"


@pytest.fixture(scope="module")
def make_yard_home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, mode: str
) -> Callable[..., YardHome]:
    """Makes homes of the module's mode."""

    def make(*, schedulers: int = 1, **settings: str) -> YardHome:
        folder = tmp_path_factory.mktemp("home")
        if mode == "embedded":
            return YardHome(folder, settings)
        return SplitHome(folder, settings, request.getfixturevalue("make_stores")(), schedulers)

    return make


@pytest.fixture
def make_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., YardHome]]:
    """Makes homes in which no yard runs yet: where `yard up` and `yard run` start one."""
    homes: list[YardHome] = []

    def make(**settings: str) -> YardHome:
        home = YardHome(tmp_path_factory.mktemp("home"), settings)
        homes.append(home)
        return home

    yield make
    for home in homes:
        home.sweep()


@pytest.fixture
def home(make_home: Callable[..., YardHome]) -> YardHome:
    """A home in which no yard runs yet."""
    return make_home()


@pytest.fixture
def yard(make_yard_home: Callable[..., YardHome]) -> Iterator[YardHome]:
    """A yard of the test's own that is up; at the end it goes down and leaves no process."""
    yield from _up_and_down(make_yard_home())


def _up_and_down(home: YardHome) -> Iterator[YardHome]:
    try:
        home.up()
        yield home
        home.up()
        home.down()
        home.assert_nothing_left()
    finally:
        home.sweep()


@pytest.fixture(scope="module")
def yard_settings() -> Mapping[str, str]:
    """The environment of a module's shared yard; a module that needs more has a fixture of this name."""
    return {"TRAINYARD_LAUNCHER_CAPACITY_CPU": "16"}


@pytest.fixture(scope="module")
def shared_yard(make_yard_home: Callable[..., YardHome], yard_settings: Mapping[str, str]) -> Iterator[YardHome]:
    """A yard for all tests of a module that need none of their own; their jobs do not mind each other."""
    yield from _up_and_down(make_yard_home(**yard_settings))


@pytest.fixture(scope="module")
def client(shared_yard: YardHome) -> Iterator[Client]:
    with shared_yard.client() as client:
        yield client


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder with `train.py` and `job.yaml`; returns the job file."""

    def write(script: str, spec: str, name: str = "probe") -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(textwrap.dedent(script))
        header = f"apiVersion: trainyard.dev/v1alpha1\nkind: TrainingJob\nmetadata: {{name: {name}}}\nspec:\n"
        (folder / "job.yaml").write_text(header + textwrap.indent(textwrap.dedent(spec), "  "))
        return folder / "job.yaml"

    return write
