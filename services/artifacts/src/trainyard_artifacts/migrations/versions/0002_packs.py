"""Packs and their chunks, lineage, retention, metrics.

Chunks used to be files of their own, which nothing reads any more: versions from before are marked deleted.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.execute("UPDATE artifact_version SET deleted_ns = created_ns WHERE deleted_ns IS NULL")
    for table in ("artifact_manifest", "artifact_alias", "artifact_part"):
        op.execute(f"DELETE FROM {table}")
    op.add_column("artifact_version", sa.Column("metrics", sa.String, nullable=False, server_default="{}"))
    op.create_table(
        "artifact_pack",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("workspace", sa.String, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("data_bytes", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_artifact_pack_workspace", "artifact_pack", ["workspace"])
    op.create_table(
        "artifact_chunk",
        sa.Column("workspace", sa.String, primary_key=True),
        sa.Column("hash", sa.LargeBinary, primary_key=True),
        sa.Column("pack", sa.String, nullable=False),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("refs", sa.Integer, nullable=False),
        sa.Column("touched_ns", sa.BigInteger, nullable=False),
        sa.Column("damaged", sa.Boolean, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_artifact_chunk_pack", "artifact_chunk", ["pack"])
    unused = sa.text("refs = 0")
    op.create_index(
        "artifact_chunk_unused", "artifact_chunk", ["touched_ns"], sqlite_where=unused, postgresql_where=unused
    )
    op.create_table(
        "artifact_input",
        sa.Column("version_id", sa.String, primary_key=True),
        sa.Column("input_id", sa.String, primary_key=True),
    )
    op.create_index("ix_artifact_input_input_id", "artifact_input", ["input_id"])
    op.create_table(
        "artifact_use",
        sa.Column("version_id", sa.String, primary_key=True),
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("attempt_id", sa.String, primary_key=True),
        sa.Column("workspace", sa.String, nullable=False),
        sa.Column("fence", sa.Integer, nullable=False),
        sa.Column("used_ns", sa.BigInteger, nullable=False),
    )
    op.create_index("artifact_use_job", "artifact_use", ["workspace", "job_id"])
    op.create_table(
        "artifact_retention",
        sa.Column("workspace", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("keep_last", sa.Integer, nullable=False),
        sa.Column("keep_best", sa.Integer, nullable=False),
        sa.Column("best_metric", sa.String, nullable=False),
        sa.Column("best_mode", sa.String, nullable=False),
        sa.Column("ttl_s", sa.Float, nullable=False),
    )
