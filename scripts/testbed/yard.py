"""A yard whose services run apart: Redis, PostgreSQL, S3, nginx and four processes, all on loopback."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from servicekit.auth import AttemptTokens, bearer_token
from trainyard.home import YARD_FILE, YardFile, write_endpoint

from scripts.testbed.ports import free_port
from scripts.testbed.proxy import ROUTES, Nginx
from scripts.testbed.server import Server
from scripts.testbed.storage import Bucket

SERVICES = tuple(ROUTES)
_PREFIX = "TRAINYARD_SERVICE_"


@dataclass(frozen=True, slots=True)
class Stores:
    """What the services keep their state in.

    Args:
        broker_url: of Redis.
        databases: an empty PostgreSQL database (or one of an earlier run) for scheduler, metrics and artifacts.
        bucket: for chunks.
        folder: where the S3 server keeps that bucket, when it is one of the testbed.
    """

    broker_url: str
    databases: Mapping[str, str]
    bucket: Bucket
    folder: Path = Path()


class ServiceProcess(Server):
    """`python -m trainyard_<name>`: ready once its port is open, which is the last thing it does."""

    def __init__(self, name: str, home: Path, environ: Mapping[str, str], process_name: str = "") -> None:
        super().__init__(home)
        self.name = process_name or name
        self.metrics_port = free_port()
        self._module = f"trainyard_{name}"
        self._environ = environ

    def command(self) -> list[str]:
        return [sys.executable, "-m", self._module]

    def environ(self) -> Mapping[str, str]:
        return {
            **self._environ,
            f"{_PREFIX}LISTEN": f"127.0.0.1:{self.port}",
            f"{_PREFIX}METRICS_LISTEN": f"127.0.0.1:{self.metrics_port}",
        }


@dataclass
class SplitYard:
    """The set. Each part can be stopped, killed and started again by its name.

    Args:
        home: TRAINYARD_HOME of the yard, of the launcher's machine; every service keeps its files there.
        stores: Redis, PostgreSQL and S3.
        environ: settings, as for the yard of one machine.
        port: of the endpoint; 0 for a free one.
        schedulers: how many; one is active.
    """

    home: Path
    stores: Stores
    environ: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    schedulers: int = 1

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        bearer_token(self.home)
        AttemptTokens.load_or_create(self.home)
        self.port = self.port or free_port()
        self.services = {process.name: process for process in self._processes()}
        addresses: dict[str, list[str]] = {name: [] for name in SERVICES}
        for process in self.services.values():
            addresses[process.name.partition("-")[0]].append(f"127.0.0.1:{process.port}")
        self.nginx = Nginx(self.home / "nginx", addresses, self.port)

    def _processes(self) -> Iterator[ServiceProcess]:
        for name in SERVICES:
            environ = self._environ_of(name)
            yield ServiceProcess(name, self.home, environ)
            for number in range(2, self.schedulers + 1 if name == "scheduler" else 0):
                yield ServiceProcess(name, self.home, environ, f"{name}-{number}")

    def _environ_of(self, name: str) -> dict[str, str]:
        environ = {**self.environ, "TRAINYARD_HOME": str(self.home), f"{_PREFIX}HOME": str(self.home)}
        if name in self.stores.databases:
            environ[f"{_PREFIX}DATABASE_URL"] = self.stores.databases[name]
        if name in ("scheduler", "launcher"):
            environ[f"{_PREFIX}BROKER_URL"] = self.stores.broker_url
        if name == "launcher":
            environ[f"{_PREFIX}ENDPOINT"] = self.endpoint
        if name == "artifacts":
            environ |= _s3_settings(self.stores.bucket)
        return environ

    @property
    def endpoint(self) -> str:
        """Where clients and agents find every service."""
        return f"127.0.0.1:{self.port}"

    def servers(self) -> dict[str, Server]:
        """Every process by its name."""
        return {"nginx": self.nginx, **self.services}

    def start(self) -> None:
        """Starts what does not run; returns when all of it serves, and clients find it by `yard.json`."""
        for server in self.servers().values():
            server.launch()
        schedulers = [server for name, server in self.services.items() if name.startswith("scheduler")]
        schedulers[0].wait_ready(lambda: any(each.ready() for each in schedulers))  # the others stand by
        for server in self.servers().values():
            if server not in schedulers:
                server.wait_ready()
        write_endpoint(self.home, self._yard_file())

    def stop(self) -> None:
        """Ends everything gracefully; jobs go on."""
        (self.home / YARD_FILE).unlink(missing_ok=True)
        for server in reversed(self.servers().values()):
            server.resume()
            server.stop()

    def kill(self) -> None:
        """SIGKILL to the services; nginx stays, as in front of a cluster that lost its nodes."""
        for process in self.services.values():
            process.kill()

    def _yard_file(self) -> YardFile:
        return YardFile.of_this_process(self.endpoint, version("trainyard-scheduler"), ephemeral=False)


def _s3_settings(bucket: Bucket) -> dict[str, str]:
    return {
        "TRAINYARD_ARTIFACTS_S3_BUCKET": bucket.name,
        "TRAINYARD_ARTIFACTS_S3_ENDPOINT": bucket.endpoint,
        "TRAINYARD_ARTIFACTS_S3_REGION": bucket.region,
        "TRAINYARD_ARTIFACTS_S3_ACCESS_KEY_ID": bucket.access_key,
        "TRAINYARD_ARTIFACTS_S3_SECRET_ACCESS_KEY": bucket.secret_key,
    }
