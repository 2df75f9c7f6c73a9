"""Announces this launcher's machines, and goes on doing so: the announcement is a lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
from servicekit.disk import create_once
from servicekit.ids import new_id
from trainyard.home import LAUNCHER_ID_FILE
from trainyard_protos.v1 import scheduler_pb2_grpc

from trainyard_launcher.backend import Backend
from trainyard_launcher.scheduler import backoff, is_away
from trainyard_launcher.settings import Settings

logger = logging.getLogger(__name__)

_GATHER_S = 0.2  # machines that change together are announced together
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")


def launcher_id(home: Path) -> str:
    """The stable id of this home's launcher, made at first use.

    Raises:
        RuntimeError: the file holds none. A new id would abandon the attempts that run: only who has their id may say
            what became of them.
    """
    path = home / LAUNCHER_ID_FILE
    content = path.read_bytes() if path.exists() else create_once(path, f"{new_id()}\n".encode())
    found = content.decode(errors="replace").strip()
    if not _ID.fullmatch(found):
        raise RuntimeError(
            f"{path} is damaged: it holds no launcher id. Attempts that still run are found by it: put it back from a "
            "backup, or write the id into it that events of this yard's jobs name as launcher/<id>. When none runs, "
            "remove the file, and a new id is made at the next start"
        )
    return found


async def keep_registered(
    stub: scheduler_pb2_grpc.AttemptServiceAsyncStub,
    backend: Backend,
    launcher_id: str,
    settings: Settings,
    registered: Callable[[bool], Awaitable[None]],
) -> None:
    """Registers the pool and renews its lease for ever; tries again soon while the scheduler does not take it.

    Args:
        registered: told whether the pool has a lease, at first and whenever that changes.
    """
    pauses = backoff(most_s=settings.renew_s)
    until = time.monotonic()
    while True:
        request = backend.offer()
        request.pool, request.launcher_id, request.lease_s = settings.pool, launcher_id, settings.lease_s
        asked = time.monotonic()
        try:
            answer = await stub.RegisterPool(request, timeout=settings.call_timeout_s)
        except grpc.aio.AioRpcError as error:
            log = logger.info if is_away(error) else logger.error
            log("pool not registered", extra={"code": str(error.code()), "why": error.details()})
            if time.monotonic() >= until:
                await registered(False)
            await asyncio.sleep(next(pauses))
            continue
        until = asked + settings.lease_s
        await registered(True)
        pauses = backoff(most_s=settings.renew_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(answer.renew_after_s or settings.renew_s, settings.renew_s)):
                await backend.changed()
                await asyncio.sleep(_GATHER_S)
