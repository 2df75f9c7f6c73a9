"""Events of administrative changes: who changed what, when and why.

A service owns a table with the columns of `EventRecord` and writes each event in the transaction that makes the change,
so that neither is stored without the other. The newest events are kept, up to a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import grpc
import sqlalchemy
from sqlalchemy import BigInteger, Integer
from sqlmodel import Field, Session, SQLModel
from trainyard_protos.v1 import admin_pb2, scheduler_pb2

from servicekit.auth import current_principal, require_user, require_workspace
from servicekit.ids import now_ns
from servicekit.paging import page_size
from servicekit.peers import address_of
from servicekit.store import Store

KEPT = 100_000
"""How many events of administrative changes a service keeps."""
_MESSAGE_MAX = 4096
_NAME_MAX = 256

# SQLite makes only INTEGER keys the row's own number.
_SEQUENCE = BigInteger().with_variant(Integer, "sqlite")

Context = grpc.aio.ServicerContext[Any, Any]


class AdminEvent(StrEnum):
    """What was changed, as `Event.type` in scheduler.proto."""

    ALIAS_SET = "AliasSet"
    JOB_DELETED = "JobDeleted"
    VERSION_DELETED = "VersionDeleted"
    VERSIONS_EXPIRED = "VersionsExpired"
    RETENTION_SET = "RetentionSet"
    RUNS_DELETED = "RunsDeleted"
    LOGS_DELETED = "LogsDeleted"
    MAINTAINED = "Maintained"
    REPAIR_STARTED = "RepairStarted"
    REPAIRED = "Repaired"
    BACKUP_STARTED = "BackupStarted"
    BACKUP_TAKEN = "BackupTaken"
    SHUTDOWN_REQUESTED = "ShutdownRequested"


class EventRecord(SQLModel):
    """Columns of an event; a service makes its table of it: `class EventRow(EventRecord, table=True)`."""

    seq: int = Field(default=None, primary_key=True, sa_type=_SEQUENCE)
    workspace: str
    kind: str
    object_id: str
    object_name: str
    time_ns: int = Field(sa_type=BigInteger)
    actor: str
    type: str
    reason: str = ""
    message: str = ""
    state: int = 0
    attempt: int = 0


def to_message(columns: Mapping[str, Any]) -> scheduler_pb2.Event:
    """An event as it travels."""
    return scheduler_pb2.Event(**{**columns, "state": scheduler_pb2.JobState.ValueType(columns["state"])})


def caller(context: Context) -> str:
    """Who calls, as `Event.actor`: the kind of the caller and the address of the connection."""
    return f"{current_principal().kind}/{address_of(context.peer())}"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a change is about.

    Args:
        kind: as `Event.kind`.
        workspace: "" when it belongs to none.
    """

    kind: str
    name: str
    id: str = ""
    workspace: str = ""


def columns_of(actor: str, type: StrEnum, about: Subject, message: str = "", reason: str = "") -> dict[str, Any]:
    """The columns of a new event but its number, each of bounded length."""
    return {
        "workspace": about.workspace,
        "kind": about.kind,
        "object_id": about.id[:_NAME_MAX],
        "object_name": about.name[:_NAME_MAX],
        "time_ns": now_ns(),
        "actor": actor[:_NAME_MAX],
        "type": str(type),
        "reason": reason,
        "message": message if len(message) <= _MESSAGE_MAX else f"{message[: _MESSAGE_MAX - 3]}...",
        "state": 0,
        "attempt": 0,
    }


class EventLog:
    """The events of one service.

    Args:
        table: with the columns of `EventRecord`.
        kept: how many of the newest events stay.
    """

    def __init__(self, table: type[EventRecord], kept: int = KEPT) -> None:
        self._table: sqlalchemy.Table = sqlalchemy.inspect(table).local_table
        self._kept = kept

    def add(self, session: Session, columns: Mapping[str, Any]) -> None:
        """Writes an event in the caller's transaction, and removes those beyond the bound."""
        connection = session.connection()
        insert = sqlalchemy.insert(self._table).values(columns).returning(self._table.c.seq)
        seq: int = connection.execute(insert).scalar_one()
        connection.execute(sqlalchemy.delete(self._table).where(self._table.c.seq <= seq - self._kept))

    def usage(self, session: Session) -> admin_pb2.GetUsageResponse.Usage:
        """How many events there are."""
        count = session.connection().execute(sqlalchemy.select(sqlalchemy.func.count()).select_from(self._table))
        return admin_pb2.GetUsageResponse.Usage(what="events", count=count.scalar_one(), unit="events")

    async def page(self, store: Store, request: admin_pb2.ListAdminEventsRequest) -> admin_pb2.ListAdminEventsResponse:
        """Events after a number, oldest first; those that belong to no workspace are in every list.

        Raises:
            PermissionDenied: the caller is not a user.
            InvalidArgument: BadWorkspace, InvalidPage.
        """
        require_user()
        workspace = require_workspace(request.workspace)
        size = page_size(request.page_size, default=500, most=5000)
        table = self._table
        query = sqlalchemy.select(table).where(table.c.seq > request.after_seq, table.c.workspace.in_((workspace, "")))
        if request.object_name:
            query = query.where(table.c.object_name == request.object_name)
        query = query.order_by(table.c.seq).limit(size)
        rows = await store.read(lambda session: session.connection().execute(query).mappings().all())
        return admin_pb2.ListAdminEventsResponse(events=[to_message(dict(row)) for row in rows])


@dataclass(frozen=True, slots=True)
class Recorder:
    """Records what one caller changes.

    Args:
        log: of the service.
        actor: as `Event.actor`.
    """

    log: EventLog
    actor: str

    def record(
        self, session: Session, type: AdminEvent, about: Subject, message: str = "", *, reason: str = ""
    ) -> None:
        """Writes an event in the caller's transaction."""
        self.log.add(session, columns_of(self.actor, type, about, message, reason))
