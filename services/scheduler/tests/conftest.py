"""A real scheduler on a real server: on SQLite and on PostgreSQL, Celery in memory, gRPC on a free port."""

import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from servicekit import server as grpc_server
from servicekit.auth import AttemptTokens, Authenticator, bearer_token
from servicekit.celery import celery_app
from servicekit.clock import Clock
from trainyard.channel import connect
from trainyard_scheduler.app import Scheduler
from trainyard_scheduler.settings import Settings

from services.scheduler.tests.yard import Yard

OPERATOR_TOKEN = "the operator's own token"
OpenYard = Callable[..., AbstractAsyncContextManager[Yard]]


@asynccontextmanager
async def open_yard(
    home: Path, clock: Clock | None = None, *, database_url: str, **settings: object
) -> AsyncIterator[Yard]:
    bearer, tokens = bearer_token(home), AttemptTokens.load_or_create(home)
    registry = CollectorRegistry()
    celery = celery_app(f"inprocess://{home.name}")
    scheduler = Scheduler(
        home=home,
        database_url=database_url,
        celery=celery,
        settings=Settings(**settings),  # type: ignore[arg-type]
        registry=registry,
        **({"clock": clock} if clock else {}),
    )
    server = grpc_server.build(Authenticator(bearer, tokens, OPERATOR_TOKEN), CollectorRegistry())
    scheduler.register(server)
    port = grpc_server.listen(server, "127.0.0.1", 0)
    await scheduler.start()
    await server.start()
    channel = connect(f"127.0.0.1:{port}", bearer)
    try:
        yield Yard(channel, scheduler, celery, registry, port, tokens)
    finally:
        await channel.close()
        await scheduler.stop()
        await server.stop(None)


@pytest.fixture
def open_scheduler(database_url: str) -> OpenYard:
    return functools.partial(open_yard, database_url=database_url)


@pytest.fixture
async def yard(tmp_path: Path, open_scheduler: OpenYard) -> AsyncIterator[Yard]:
    async with open_scheduler(tmp_path) as opened:
        yield opened
