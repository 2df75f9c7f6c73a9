"""Announces this launcher's machines, and goes on doing so: the announcement is a lease."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from pathlib import Path

import grpc
from servicekit.ids import new_id
from trainyard.home import LAUNCHER_ID_FILE
from trainyard_protos.v1 import scheduler_pb2, scheduler_pb2_grpc

from trainyard_launcher.backend import Backend
from trainyard_launcher.scheduler import backoff
from trainyard_launcher.settings import Settings

logger = logging.getLogger(__name__)


def launcher_id(home: Path) -> str:
    """The stable id of this home's launcher, made at first use."""
    path = home / LAUNCHER_ID_FILE
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        draft.write_text(new_id() + "\n")
        draft.rename(path)
    return path.read_text().strip()


async def keep_registered(
    stub: scheduler_pb2_grpc.AttemptServiceAsyncStub, backend: Backend, launcher_id: str, settings: Settings
) -> None:
    """Registers the pool and renews its lease for ever; tries again soon while the scheduler is away."""
    while True:
        request = scheduler_pb2.RegisterPoolRequest(
            pool=settings.pool, launcher_id=launcher_id, machines=backend.machines(), lease_s=settings.lease_s
        )
        for pause_s in backoff(most_s=settings.renew_s):
            try:
                answer = await stub.RegisterPool(request, timeout=settings.call_timeout_s)
                break
            except grpc.aio.AioRpcError as error:
                logger.info("pool not registered", extra={"code": str(error.code()), "why": error.details()})
            await asyncio.sleep(pause_s)
        await asyncio.sleep(min(answer.renew_after_s or settings.renew_s, settings.renew_s))
