"""SchedulerAdminService: what an operator asks of the scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from servicekit import backup, presence
from servicekit.auth import require_user
from servicekit.events import AdminEvent, Subject, caller
from servicekit.store import Store
from servicekit.usage import Usage, database_bytes, free_bytes
from servicekit.verify import database_findings
from sqlalchemy import func, select
from sqlmodel import Session
from trainyard.home import LAUNCHER_ID_FILE
from trainyard_protos.v1 import admin_pb2, admin_pb2_grpc

from trainyard_scheduler.ledger import Ledger, Transaction
from trainyard_scheduler.tables import ATTEMPTS, EVENTS, JOBS, TOMBSTONES

DATABASE = "scheduler.db"
SERVICE = Subject("Service", "scheduler")

_Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerAdminServicer(admin_pb2_grpc.SchedulerAdminServiceServicer):
    """Usage, verification and backup.

    Args:
        home: folder of the yard, where snapshots lie while they are sent.
    """

    def __init__(self, store: Store, ledger: Ledger, home: Path) -> None:
        self._store = store
        self._ledger = ledger
        self._home = home

    async def GetUsage(self, request: admin_pb2.GetUsageRequest, context: _Context) -> admin_pb2.GetUsageResponse:
        require_user()
        return admin_pb2.GetUsageResponse(usage=await self._store.read(_usage), free_bytes=free_bytes(self._home))

    async def Verify(
        self, request: admin_pb2.VerifyRequest, context: _Context
    ) -> AsyncIterator[admin_pb2.VerifyResponse]:
        require_user()
        actor = caller(context)

        async def acknowledge(what: str) -> None:
            def change(tx: Transaction) -> None:
                presence.acknowledge(tx.connection)
                tx.other_event(actor, AdminEvent.REPAIRED, SERVICE, what)

            await self._ledger.write(change)

        for finding in await database_findings(self._store, acknowledge=acknowledge if request.repair else None):
            yield admin_pb2.VerifyResponse(checked=0, total=1, finding=finding)
        yield admin_pb2.VerifyResponse(checked=1, total=1)

    def Backup(self, request: admin_pb2.BackupRequest, context: _Context) -> AsyncIterator[admin_pb2.BackupResponse]:
        require_user()
        actor = caller(context)

        async def record(type: AdminEvent, message: str) -> None:
            await self._ledger.write(lambda tx: tx.other_event(actor, type, SERVICE, message))

        pieces = backup.database_and_files(self._store.engine, DATABASE, self._home, self._files)
        return backup.recorded(self._store.engine, backup.in_threads(pieces), record)

    def _files(self) -> list[Path]:
        """On one machine, who its launcher is: a restored yard's launcher then answers for the attempts of before."""
        return [Path(LAUNCHER_ID_FILE)] if (self._home / LAUNCHER_ID_FILE).exists() else []


def _usage(session: Session) -> list[Usage]:
    attempts = ATTEMPTS.join(JOBS, JOBS.c.id == ATTEMPTS.c.job_id)
    usage = [Usage(what="database", bytes=database_bytes(session))]
    for what, source, workspace in (
        ("jobs", JOBS, JOBS.c.workspace),
        ("attempts", attempts, JOBS.c.workspace),
        ("events", EVENTS, EVENTS.c.workspace),
        ("tombstones", TOMBSTONES, TOMBSTONES.c.workspace),
    ):
        query = select(workspace, func.count()).select_from(source).group_by(workspace).order_by(workspace)
        for name, count in session.connection().execute(query):
            usage.append(Usage(what=what, workspace=name, count=count, unit=what))
    return usage
