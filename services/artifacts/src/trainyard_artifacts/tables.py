"""Tables of the artifact store.

Versions are never removed, only marked deleted, so that numbers are not given twice, a repeated commit of a deleted
version does not bring it back, and lineage stays readable. Their manifests are removed.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Index, UniqueConstraint
from sqlmodel import Field, SQLModel


class VersionRow(SQLModel, table=True):
    __tablename__ = "artifact_version"
    __table_args__ = (
        UniqueConstraint("workspace", "name", "number"),
        UniqueConstraint("workspace", "idempotency_key"),
        Index("artifact_version_job", "workspace", "job_id"),
    )

    id: str = Field(primary_key=True)
    workspace: str
    name: str
    number: int
    kind: str
    digest: bytes
    size: int = Field(sa_type=BigInteger)
    files: int
    created_ns: int = Field(sa_type=BigInteger)
    idempotency_key: str | None = None
    job_id: str = ""
    attempt_id: str = ""
    fence: int = 0
    checkpoint: bytes | None = None  # a serialized CheckpointInfo
    labels: str = "{}"  # JSON object
    inputs: str = "[]"  # JSON list of version ids
    deleted_ns: int | None = Field(default=None, sa_type=BigInteger)


class ManifestRow(SQLModel, table=True):
    """The canonical manifest of a version that is not deleted."""

    __tablename__ = "artifact_manifest"

    version_id: str = Field(primary_key=True)
    workspace: str = Field(index=True)
    content: bytes


class AliasRow(SQLModel, table=True):
    __tablename__ = "artifact_alias"

    workspace: str = Field(primary_key=True)
    name: str = Field(primary_key=True)
    alias: str = Field(primary_key=True)
    version_id: str = Field(index=True)


class FenceRow(SQLModel, table=True):
    """The highest fence seen of a job."""

    __tablename__ = "artifact_fence"

    workspace: str = Field(primary_key=True)
    job_id: str = Field(primary_key=True)
    fence: int


class PartRow(SQLModel, table=True):
    """One node's part of a version whose other parts are not there yet."""

    __tablename__ = "artifact_part"

    workspace: str = Field(primary_key=True)
    key: str = Field(primary_key=True)  # the idempotency key that all parts share
    part: int = Field(primary_key=True)
    parts: int
    request: bytes  # a serialized CommitRequest
    created_ns: int = Field(sa_type=BigInteger)
