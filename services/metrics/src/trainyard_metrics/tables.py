"""Tables of the metrics ingestor. Records themselves are in files: see `journal`."""

from __future__ import annotations

from sqlalchemy import BigInteger, Index
from sqlmodel import Field, SQLModel


class RunRow(SQLModel, table=True):
    __tablename__ = "metrics_run"
    __table_args__ = (Index("metrics_run_job", "workspace", "job_id"),)

    id: str = Field(primary_key=True)
    workspace: str
    job_id: str = ""
    fence: int = 0
    name: str = ""
    created_ns: int = Field(sa_type=BigInteger)
    params: str = "{}"  # JSON object
    tags: str = "{}"  # JSON object of strings
    notes: str = ""
    context: str = "{}"  # JSON object
    rewind: bytes | None = None  # a serialized Rewind


class FenceRow(SQLModel, table=True):
    """The highest fence seen of a job."""

    __tablename__ = "metrics_fence"

    workspace: str = Field(primary_key=True)
    job_id: str = Field(primary_key=True)
    fence: int
