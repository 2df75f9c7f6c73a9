"""A yard whose services run apart, at work, and a Prometheus that has been watching it from the start."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from servicekit.auth import AttemptTokens, bearer_token
from trainyard import errors
from trainyard.client import Client, JobHandle

from scripts.testbed.observability import Prometheus, Scrape
from scripts.testbed.yard import ServiceProcess
from tests.conftest import REPOSITORY, SplitHome, wait_until
from tests.jobs import document, python, running

RULES = REPOSITORY / "charts" / "trainyard" / "alerts" / "trainyard.yaml"
PATIENCE_S = 240
TRAINS = """
    import pathlib, sys, time
    from trainyard import tracker

    pathlib.Path("checkpoints").mkdir(exist_ok=True)
    step = 0
    while not pathlib.Path(sys.argv[1]).exists():
        step += 1
        tracker.log({"loss": 1 / step, "accuracy": 1 - 1 / step}, step=step)
        if step % 20 == 0:
            pathlib.Path("checkpoints/draft").write_text(f"weights {step}")
            pathlib.Path("checkpoints/draft").rename(f"checkpoints/step-{step}.txt")
        time.sleep(0.1)
"""
GPU = {"cpu": 1, "memory": "256Mi", "gpu": 1}
CHECKPOINTS = {"path": "checkpoints", "pattern": "step-{step}.txt", "keep": {"last": 2}}


@dataclass(frozen=True)
class Watched:
    """What is watched, and who watches.

    Attributes:
        job: it trains, on the one GPU there is, until all tests are done.
        since: Unix time from which on Prometheus has watched.
        certificate: that the service with TLS serves with.
    """

    prometheus: Prometheus
    job: JobHandle
    since: float
    certificate: Path

    def until_shown(self, expr: str, *, over_time: bool = False) -> None:
        """Waits until a query gives a series with a number, now or at some time since the start."""
        wait_until(lambda: self._shown(expr, over_time), f"a series of {expr}", PATIENCE_S)

    def _shown(self, expr: str, over_time: bool) -> bool:
        if not over_time:
            return any(not math.isnan(float(each["value"][1])) for each in self.prometheus.query(expr))
        found = self.prometheus.query_range(expr, self.since, time.time(), 5)
        return any(not math.isnan(float(text)) for each in found for _, text in each["values"])


@pytest.fixture(scope="package")
def mode() -> str:
    return "split"


@pytest.fixture(scope="package")
def yard(tmp_path_factory: pytest.TempPathFactory, make_stores) -> Iterator[SplitHome]:
    """One machine of four cores and a declared GPU."""
    settings = {"TRAINYARD_LAUNCHER_CAPACITY_CPU": "4", "TRAINYARD_LAUNCHER_CAPACITY_GPU": "1"}
    home = SplitHome(tmp_path_factory.mktemp("home"), settings, make_stores())
    try:
        home.up()
        yield home
        home.down()
    finally:
        home.sweep()


@pytest.fixture(scope="package")
def secure_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service of its own that serves with a certificate, as it has to beyond loopback."""
    home = tmp_path_factory.mktemp("secure")
    bearer_token(home)
    AttemptTokens.load_or_create(home)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "90",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=home, check=True, capture_output=True,
    )  # fmt: skip
    environ = {"HOME": home, "TLS_CERT": home / "cert.pem", "TLS_KEY": home / "key.pem"}
    given = {f"TRAINYARD_SERVICE_{name}": str(value) for name, value in environ.items()}
    service = ServiceProcess("metrics", home, given, "metrics-secure")
    try:
        service.start()
        yield service
        service.stop()
    finally:
        service.kill()


@pytest.fixture(scope="package")
def watched(
    tmp_path_factory: pytest.TempPathFactory, yard: SplitHome, secure_service: ServiceProcess
) -> Iterator[Watched]:
    """The yard with a job that trains, one that failed, one that waits and one that fits nowhere."""
    addresses = [f"127.0.0.1:{service.metrics_port}" for service in yard.split.services.values()]
    secure = secure_service.folder
    scrapes = [
        Scrape("trainyard", addresses, yard.folder / "token"),
        Scrape("trainyard-secure", [f"127.0.0.1:{secure_service.metrics_port}"], secure / "token", secure / "cert.pem"),
    ]
    since = time.time()
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), scrapes, [RULES])
    enough = tmp_path_factory.mktemp("gate") / "enough"
    try:
        prometheus.start()
        # What is counted shows as an increase only to who saw the count before.
        for service in yard.split.services:
            wait_until(
                lambda name=service: prometheus.query(f'trainyard_ready{{service="{name}"}} == 1'),
                f"{service} to be scraped",
                PATIENCE_S,
            )
        wait_until(lambda: prometheus.query("trainyard_pool_alive == 1"), "the pool to be seen", PATIENCE_S)
        with yard.client() as client:
            job, *queued = _work(client, enough)
            yield Watched(prometheus, job, since, secure / "cert.pem")
            for each in queued:  # before the one that waits gets the GPU
                each.cancel()
            enough.touch()
            job.wait(PATIENCE_S)
        prometheus.stop()
    finally:
        enough.touch()
        prometheus.kill()


def _work(client: Client, enough: Path) -> tuple[JobHandle, ...]:
    """The job that trains, then those that are queued."""
    client.submit(document(["false"], "fails")).wait(PATIENCE_S, check=False)
    secrets = [{"name": "KEY", "from": {"env": f"NOT_SET_{os.getpid()}"}}]
    client.submit(document(["true"], "unlaunchable", secrets=secrets)).wait(PATIENCE_S, check=False)
    job = client.submit(document(python(TRAINS, str(enough)), "trains", resources=GPU, checkpoints=CHECKPOINTS))
    running(job)
    waits = client.submit(document(["true"], "waits", resources=GPU))
    never = client.submit(document(["true"], "never", resources={"cpu": 99, "memory": "1Gi"}))
    with pytest.raises(errors.NotFound):
        client.job("nobody").status()
    return job, waits, never
