"""Tables of the metrics ingestor. Records themselves are in files: see `journal`."""

from __future__ import annotations

from servicekit.events import EventRecord
from sqlalchemy import BigInteger, Double, Index
from sqlmodel import Field, SQLModel


class RunRow(SQLModel, table=True):
    __tablename__ = "metrics_run"
    __table_args__ = (
        Index("metrics_run_job", "workspace", "job_id"),
        Index("metrics_run_newest", "workspace", "created_ns", "id"),
    )

    id: str = Field(primary_key=True)
    workspace: str
    job_id: str = ""
    fence: int = 0
    name: str = ""
    created_ns: int = Field(sa_type=BigInteger)
    updated_ns: int = Field(default=0, sa_type=BigInteger)  # of the newest point; 0: none yet
    params: str = "{}"  # JSON object
    spec: str = "{}"  # JSON object
    tags: str = "{}"  # JSON object of strings
    notes: str = ""
    context: str = "{}"  # JSON object
    rewind: bytes | None = None  # a serialized Rewind
    superseded: bool = False  # a later attempt of its job has opened a run
    logs_removed: bool = False  # because they were old
    database_id: str = ""  # of the scheduler's that had the job when the run was opened
    dirty: bool = False  # points may be newer than the summary: after a crash it is made anew


class FenceRow(SQLModel, table=True):
    """The highest fence seen of a job, and the highest of an attempt that is over."""

    __tablename__ = "metrics_fence"

    workspace: str = Field(primary_key=True)
    job_id: str = Field(primary_key=True)
    fence: int
    closed: int = -1


class UndeliveredRow(SQLModel, table=True):
    """A run of an attempt that is over, and the writers whose records its launcher may still deliver."""

    __tablename__ = "metrics_undelivered"

    run_id: str = Field(primary_key=True)
    writers: str  # JSON array


class RemovalRow(SQLModel, table=True):
    """A run that a user removed, until nothing of it is left."""

    __tablename__ = "metrics_removal"

    run_id: str = Field(primary_key=True)


class SummaryRow(SQLModel, table=True):
    """All series of a run: see `domain.summary`. Of an attempt: the job's visible series up to it."""

    __tablename__ = "metrics_summary"

    run_id: str = Field(primary_key=True)
    packed: bytes


class ValueRow(SQLModel, table=True):
    """The last value of a series' lowest rank, to be searched by. NULL is NaN."""

    __tablename__ = "metrics_value"
    __table_args__ = (
        Index("metrics_value_search", "name", "value", "run_id"),
        Index("metrics_value_run", "run_id"),
        {"sqlite_with_rowid": False},
    )

    name: str = Field(primary_key=True)
    run_id: str = Field(primary_key=True)
    value: float | None = Field(default=None, sa_type=Double)


class ParamRow(SQLModel, table=True):
    """A parameter, flattened: see `domain.params`."""

    __tablename__ = "metrics_param"
    __table_args__ = (Index("metrics_param_run", "run_id"), {"sqlite_with_rowid": False})

    key: str = Field(primary_key=True)
    run_id: str = Field(primary_key=True)
    text: str
    number: float | None = Field(default=None, sa_type=Double)


class SpecRow(SQLModel, table=True):
    """A field of a job's spec, flattened as parameters are."""

    __tablename__ = "metrics_spec"
    __table_args__ = (Index("metrics_spec_run", "run_id"), {"sqlite_with_rowid": False})

    key: str = Field(primary_key=True)
    run_id: str = Field(primary_key=True)
    text: str
    number: float | None = Field(default=None, sa_type=Double)


class TagRow(SQLModel, table=True):
    __tablename__ = "metrics_tag"
    __table_args__ = (Index("metrics_tag_run", "run_id"), {"sqlite_with_rowid": False})

    key: str = Field(primary_key=True)
    run_id: str = Field(primary_key=True)
    value: str


class EventRow(EventRecord, table=True):
    """What users changed."""

    __tablename__ = "metrics_event"
    __table_args__ = (Index("metrics_event_object", "object_name", "seq"),)
