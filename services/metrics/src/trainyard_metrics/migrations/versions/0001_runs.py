"""Runs and fences."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "metrics_run",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("workspace", sa.String, nullable=False),
        sa.Column("job_id", sa.String, nullable=False),
        sa.Column("fence", sa.Integer, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("created_ns", sa.BigInteger, nullable=False),
        sa.Column("params", sa.String, nullable=False),
        sa.Column("tags", sa.String, nullable=False),
        sa.Column("notes", sa.String, nullable=False),
        sa.Column("context", sa.String, nullable=False),
        sa.Column("rewind", sa.LargeBinary),
    )
    op.create_index("metrics_run_job", "metrics_run", ["workspace", "job_id"])
    op.create_table(
        "metrics_fence",
        sa.Column("workspace", sa.String, primary_key=True),
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("fence", sa.Integer, nullable=False),
    )
