"""Fixtures with real servers, for every test of the project.

The servers live as long as the session. A test may stop, kill, pause or restart one through its handle (`redis_server`,
`postgres_server`, `s3_server`): it is brought back afterwards. What a test stores is its own: a fresh database, a fresh
bucket.

A run of tests leaves nothing on this machine, however it ends (`runs`).
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from scripts.testbed.databases import Postgres, Redis
from scripts.testbed.runs.run import Run
from scripts.testbed.server import Server
from scripts.testbed.storage import S3, Bucket
from scripts.testbed.yard import Stores

S = TypeVar("S", bound=Server)
_numbers = itertools.count()
_REDIS_DATABASES = 16
_RUN = pytest.StashKey[Run]()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Begins the run, before it has workers: they belong to it."""
    if not hasattr(session.config, "workerinput"):
        session.config.stash[_RUN] = Run()


def pytest_report_header(config: pytest.Config) -> str | None:
    run = config.stash.get(_RUN, None)
    if run is None or not run.why_no_group:
        return None
    return f"testbed: no control group ({run.why_no_group}): processes of this run are found by their environment"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if (run := session.config.stash.get(_RUN, None)) is not None:
        run.note_pytest_folder()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    run = config.stash.get(_RUN, None)
    if run is not None and (left := run.end()):
        print(f"testbed: not everything could be cleaned up; the next run tries again:\n{left}")


@pytest.fixture(scope="session")
def server_folder() -> Iterator[Path]:
    """Reachable for the unprivileged user that PostgreSQL runs as, which pytest's own folders are not."""
    folder = Path(tempfile.mkdtemp(prefix="trainyard-testbed-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def _redis(server_folder: Path) -> Iterator[Redis]:
    yield from _run(Redis(server_folder / "redis"))


@pytest.fixture(scope="session")
def _postgres(server_folder: Path) -> Iterator[Postgres]:
    yield from _run(Postgres(server_folder / "postgres"))


@pytest.fixture(scope="session")
def _s3(server_folder: Path) -> Iterator[S3]:
    yield from _run(S3(server_folder / "s3"))


def _run(server: S) -> Iterator[S]:
    try:
        server.start()
        yield server
        server.stop()
    finally:
        server.kill()


def _brought_back(server: S) -> Iterator[S]:
    server.start()
    yield server
    server.resume()
    server.start()


@pytest.fixture(scope="session")
def make_stores(_redis: Redis, _postgres: Postgres, _s3: S3) -> Callable[[], Stores]:
    """Makes empty stores for yards whose services run apart."""

    def make() -> Stores:
        number = next(_numbers)
        broker = number % _REDIS_DATABASES
        for server in (_redis, _postgres, _s3):
            server.start()
        _redis.wipe(broker)
        databases = {name: _postgres.create(f"yard{number}_{name}") for name in ("scheduler", "metrics", "artifacts")}
        bucket = _s3.bucket(f"yard-{number}")
        return Stores(_redis.url(broker), databases, bucket, _s3.objects / bucket.name)

    return make


@pytest.fixture
def redis_server(_redis: Redis) -> Iterator[Redis]:
    """The Redis of this session, up."""
    yield from _brought_back(_redis)


@pytest.fixture
def postgres_server(_postgres: Postgres) -> Iterator[Postgres]:
    """The PostgreSQL of this session, up."""
    yield from _brought_back(_postgres)


@pytest.fixture
def s3_server(_s3: S3) -> Iterator[S3]:
    """The S3 server of this session, up."""
    yield from _brought_back(_s3)


@pytest.fixture
def redis_url(redis_server: Redis) -> str:
    """An empty Redis database."""
    number = next(_numbers) % _REDIS_DATABASES
    redis_server.wipe(number)
    return redis_server.url(number)


@pytest.fixture
def make_postgres_url(postgres_server: Postgres) -> Iterator[Callable[[], str]]:
    """Makes empty PostgreSQL databases."""
    names: list[str] = []

    def make() -> str:
        names.append(f"test{next(_numbers)}")
        return postgres_server.create(names[-1])

    yield make
    postgres_server.resume()
    postgres_server.start()
    for name in names:
        postgres_server.drop(name)


@pytest.fixture
def postgres_url(make_postgres_url: Callable[[], str]) -> str:
    """An empty PostgreSQL database."""
    return make_postgres_url()


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of either kind: the test runs on both."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/database.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def s3(s3_server: S3) -> Bucket:
    """An empty S3 bucket."""
    return s3_server.bucket(f"test-{next(_numbers)}")
