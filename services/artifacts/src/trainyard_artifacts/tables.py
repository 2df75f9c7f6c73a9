"""Tables of the artifact store.

Versions are never removed, only marked deleted, so that numbers are not given twice, a repeated commit of a deleted
version does not bring it back, and lineage stays readable. Their manifests are removed.

A chunk counts the manifests that hold it, those of waiting parts included. What counts none is removed once nobody
asked for it for the grace time.
"""

from __future__ import annotations

from servicekit.events import EventRecord
from sqlalchemy import BigInteger, Index, UniqueConstraint, text
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
    metrics: str = "{}"  # JSON object, with NaN and Infinity as JavaScript writes them
    deleted_ns: int | None = Field(default=None, sa_type=BigInteger)
    # When it became the newest of its artifact; None for outputs of an attempt that has not succeeded, or not yet.
    published_ns: int | None = Field(default=None, sa_type=BigInteger)


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
    """The highest fence seen of a job, and the highest of an attempt that is over."""

    __tablename__ = "artifact_fence"

    workspace: str = Field(primary_key=True)
    job_id: str = Field(primary_key=True)
    fence: int
    closed: int = -1


class PartRow(SQLModel, table=True):
    """One node's part of a version whose other parts are not there yet."""

    __tablename__ = "artifact_part"

    workspace: str = Field(primary_key=True)
    key: str = Field(primary_key=True)  # the idempotency key that all parts share
    part: int = Field(primary_key=True)
    parts: int
    request: bytes  # a serialized CommitRequest
    created_ns: int = Field(sa_type=BigInteger)


class PackRow(SQLModel, table=True):
    """A pack whose chunks are known to `ChunkRow`."""

    __tablename__ = "artifact_pack"

    id: str = Field(primary_key=True)
    workspace: str = Field(index=True)
    size: int = Field(sa_type=BigInteger)
    data_bytes: int = Field(sa_type=BigInteger)  # of chunks, when it was written


class ChunkRow(SQLModel, table=True):
    """Where a chunk lies, and how many manifests hold it."""

    __tablename__ = "artifact_chunk"
    __table_args__ = (
        Index(
            "artifact_chunk_unused",
            "touched_ns",
            sqlite_where=text("refs = 0"),
            postgresql_where=text("refs = 0"),
        ),
        {"sqlite_with_rowid": False},
    )

    workspace: str = Field(primary_key=True)
    hash: bytes = Field(primary_key=True)
    pack: str = Field(index=True)
    offset: int = Field(sa_type=BigInteger)
    size: int
    refs: int = 0
    touched_ns: int = Field(sa_type=BigInteger)  # when it was stored, asked for while unused, or given up by a manifest
    damaged: bool = False  # found damaged or gone: counts as missing until it is sent again


class InputRow(SQLModel, table=True):
    """A version was made from another."""

    __tablename__ = "artifact_input"

    version_id: str = Field(primary_key=True)
    input_id: str = Field(primary_key=True, index=True)


class UseRow(SQLModel, table=True):
    """A job worked with a version."""

    __tablename__ = "artifact_use"
    __table_args__ = (Index("artifact_use_job", "workspace", "job_id"),)

    version_id: str = Field(primary_key=True)
    job_id: str = Field(primary_key=True)
    attempt_id: str = Field(primary_key=True)
    workspace: str
    fence: int
    used_ns: int = Field(sa_type=BigInteger)


class RetentionRow(SQLModel, table=True):
    """Which versions of an artifact are kept, as a user asked."""

    __tablename__ = "artifact_retention"

    workspace: str = Field(primary_key=True)
    name: str = Field(primary_key=True)
    keep_last: int = 0
    keep_best: int = 0
    best_metric: str = ""
    best_mode: str = ""
    ttl_s: float = 0.0


class EventRow(EventRecord, table=True):
    """What users changed."""

    __tablename__ = "artifact_event"
    __table_args__ = (Index("artifact_event_object", "object_name", "seq"),)
