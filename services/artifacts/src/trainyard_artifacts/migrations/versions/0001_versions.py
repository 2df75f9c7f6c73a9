"""Versions, manifests, aliases, fences, parts."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "artifact_version",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("workspace", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("files", sa.Integer, nullable=False),
        sa.Column("created_ns", sa.BigInteger, nullable=False),
        sa.Column("idempotency_key", sa.String),
        sa.Column("job_id", sa.String, nullable=False),
        sa.Column("attempt_id", sa.String, nullable=False),
        sa.Column("fence", sa.Integer, nullable=False),
        sa.Column("checkpoint", sa.LargeBinary),
        sa.Column("labels", sa.String, nullable=False),
        sa.Column("inputs", sa.String, nullable=False),
        sa.Column("deleted_ns", sa.BigInteger),
        sa.UniqueConstraint("workspace", "name", "number"),
        sa.UniqueConstraint("workspace", "idempotency_key"),
    )
    op.create_index("artifact_version_job", "artifact_version", ["workspace", "job_id"])
    op.create_table(
        "artifact_manifest",
        sa.Column("version_id", sa.String, primary_key=True),
        sa.Column("workspace", sa.String, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_artifact_manifest_workspace", "artifact_manifest", ["workspace"])
    op.create_table(
        "artifact_alias",
        sa.Column("workspace", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("alias", sa.String, primary_key=True),
        sa.Column("version_id", sa.String, nullable=False),
    )
    op.create_index("ix_artifact_alias_version_id", "artifact_alias", ["version_id"])
    op.create_table(
        "artifact_fence",
        sa.Column("workspace", sa.String, primary_key=True),
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("fence", sa.Integer, nullable=False),
    )
    op.create_table(
        "artifact_part",
        sa.Column("workspace", sa.String, primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("part", sa.Integer, primary_key=True),
        sa.Column("parts", sa.Integer, nullable=False),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("created_ns", sa.BigInteger, nullable=False),
    )
