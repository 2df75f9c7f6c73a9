"""Tables of the scheduler. Records (`Job`, `Attempt`, ...) are plain; their `*Table` twins say where they are stored.

What changes rarely or is large (the spec) is apart from what changes with every transition, so that a transition
rewrites little.
"""

from __future__ import annotations

import sqlalchemy
from servicekit.events import EventRecord
from servicekit.outbox import OutboxRow
from sqlalchemy import BigInteger, Index, Table, UniqueConstraint
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

_BIG = BigInteger

NOT_OF_JOBS = sqlalchemy.text("kind != 'Job'")
"""Events of pools and of administrative changes: no job takes them with it when it is removed."""


class Record(SQLModel, registry=registry()):
    """Base of all records; a registry of its own keeps the names apart from other services'."""


class Job(Record):
    """One job. Times are UTC nanoseconds, 0 for never."""

    id: str = Field(primary_key=True)
    workspace: str
    name: str
    number: int = 0
    """Of the jobs of this name, from 1."""
    owner_kind: str = ""
    owner_id: str = ""
    queue: str
    priority: int
    labels: str = "{}"
    idempotency_key: str
    nodes: int
    workers_per_node: int
    cpu_milli: int
    memory_bytes: int = Field(sa_type=_BIG)
    gpu: int
    policy: str
    secrets_checked: int = 0
    """1: whoever wrote the document may read the Secrets that it names."""
    created_ns: int = Field(sa_type=_BIG)
    # From here on: what transitions change.
    state: int
    reason: str = ""
    message: str = ""
    attempt: int = 0
    attempt_id: str = ""
    retries_used: int = 0
    free_retries_used: int = 0
    not_before_ns: int = Field(default=0, sa_type=_BIG)
    deadline_ns: int = Field(default=0, sa_type=_BIG)
    updated_ns: int = Field(sa_type=_BIG)
    started_ns: int = Field(default=0, sa_type=_BIG)
    ended_ns: int = Field(default=0, sa_type=_BIG)
    expires_ns: int = Field(default=0, sa_type=_BIG)
    exit: bytes = b""
    rejected_checkpoints: str = "[]"
    event_seq: int = Field(default=0, sa_type=_BIG)


class JobTable(Job, table=True):
    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("workspace", "idempotency_key", name="jobs_idempotency"),
        Index("jobs_by_name", "workspace", "name", "id"),
        Index("jobs_by_number", "workspace", "name", "number", unique=True),
        Index("jobs_by_state", "workspace", "state", "id"),
        Index("jobs_by_owner", "workspace", "owner_kind", "owner_id", "id"),
        Index("jobs_by_expiry", "expires_ns", sqlite_where=sqlalchemy.text("expires_ns > 0")),
    )


class DocumentTable(Record, table=True):
    """The resolved spec of a job, JSON."""

    __tablename__ = "documents"
    job_id: str = Field(primary_key=True)
    spec: str


class JobNumberTable(Record, table=True):
    """The number of the newest job of a name, for as long as there is one of that name."""

    __tablename__ = "job_numbers"
    workspace: str = Field(primary_key=True)
    name: str = Field(primary_key=True)
    newest: int


class LabelTable(Record, table=True):
    """Labels of jobs, for filters."""

    __tablename__ = "labels"
    __table_args__ = (Index("labels_by_value", "key", "value", "job_id"),)
    job_id: str = Field(primary_key=True)
    key: str = Field(primary_key=True)
    value: str


class Attempt(Record):
    """One try at running a job; its number is its fence."""

    id: str = Field(primary_key=True)
    job_id: str = Field(index=True)
    number: int
    pool: str
    created_ns: int = Field(sa_type=_BIG)
    # From here on: what transitions change.
    state: str
    machines: str
    launcher_id: str = ""
    stop_reason: str = ""
    claimed_ns: int = Field(default=0, sa_type=_BIG)
    started_ns: int = Field(default=0, sa_type=_BIG)
    ended_ns: int = Field(default=0, sa_type=_BIG)
    finalize_by_ns: int = Field(default=0, sa_type=_BIG)
    exit: bytes = b""


class AttemptTable(Attempt, table=True):
    __tablename__ = "attempts"
    __table_args__ = (Index("attempts_alive", "state", sqlite_where=sqlalchemy.text("state != 'ended'")),)


class Event(EventRecord, Record):
    """Who, what, when, why."""


class EventTable(Event, table=True):
    __tablename__ = "events"
    __table_args__ = (
        Index("events_by_object", "object_id", "seq"),
        Index("events_not_of_jobs", "seq", sqlite_where=NOT_OF_JOBS, postgresql_where=NOT_OF_JOBS),
    )


class Pool(Record):
    """The machines of one launcher."""

    name: str = Field(primary_key=True)
    launcher_id: str
    lease_s: float
    alive: bool
    seen_ns: int = Field(sa_type=_BIG)
    announced: bytes  # its RegisterPoolRequest
    blocked: str  # JSON: kinds of machines that did not come in time, and until when they are not tried


class PoolTable(Pool, table=True):
    __tablename__ = "pools"


ARTIFACTS = "@artifacts"
"""In place of a tombstone's pool, whose name it cannot be: the job's checkpoints in artifacts."""


class Tombstone(Record):
    """What a removed job left in one place: attempts in a pool, with an empty pool its runs in metrics, with
    "@artifacts" its checkpoints.

    It stays until a launcher confirms that nothing of it is left.
    """

    job_id: str = Field(primary_key=True)
    pool: str = Field(primary_key=True)
    workspace: str
    attempt_ids: str = "[]"  # JSON list; of artifacts: references to versions that stay
    due_ns: int = Field(sa_type=_BIG)


class TombstoneTable(Tombstone, table=True):
    __tablename__ = "tombstones"


class DatabaseIdTable(Record, table=True):
    """One row: which database this is. A backup of it has the same id."""

    __tablename__ = "database_id"
    id: str = Field(primary_key=True)


class OutboxTable(OutboxRow, Record, table=True):  # type: ignore[no-redef]  # it has a field `kwargs`
    """Messages to launchers that are not sent yet."""

    __tablename__ = "outbox"


def _core(table: type[SQLModel]) -> Table:
    core = sqlalchemy.inspect(table).local_table
    assert isinstance(core, Table)
    return core


JOBS = _core(JobTable)
DOCUMENTS = _core(DocumentTable)
JOB_NUMBERS = _core(JobNumberTable)
LABELS = _core(LabelTable)
ATTEMPTS = _core(AttemptTable)
EVENTS = _core(EventTable)
POOLS = _core(PoolTable)
OUTBOX = _core(OutboxTable)
TOMBSTONES = _core(TombstoneTable)
DATABASE_ID = _core(DatabaseIdTable)


def _after(record: type[Record], first: str) -> tuple[str, ...]:
    names = list(record.model_fields)
    return tuple(names[names.index(first) :])


JOB_CHANGES = _after(Job, "state")
ATTEMPT_CHANGES = _after(Attempt, "state")
