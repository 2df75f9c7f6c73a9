"""Summaries of series, and what a search looks at."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_SUPERSEDE = """
UPDATE metrics_run SET superseded = {true} WHERE job_id <> '' AND EXISTS (
    SELECT 1 FROM metrics_run AS later WHERE later.workspace = metrics_run.workspace
    AND later.job_id = metrics_run.job_id AND later.fence > metrics_run.fence)
"""


def upgrade() -> None:
    op.add_column("metrics_run", sa.Column("updated_ns", sa.BigInteger, nullable=False, server_default="0"))
    for flag in ("superseded", "dirty"):
        op.add_column("metrics_run", sa.Column(flag, sa.Boolean, nullable=False, server_default=sa.false()))
    # Runs that are there already have no summary yet.
    op.execute(sa.text("UPDATE metrics_run SET dirty = :yes").bindparams(yes=True))
    op.execute(_SUPERSEDE.format(true="TRUE"))
    _create_tables()


def _create_tables() -> None:
    op.create_table(
        "metrics_summary",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("packed", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "metrics_value",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("value", sa.Double),
        sqlite_with_rowid=False,
    )
    op.create_index("metrics_value_search", "metrics_value", ["name", "value", "run_id"])
    op.create_table(
        "metrics_param",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("text", sa.String, nullable=False),
        sa.Column("number", sa.Double),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "metrics_tag",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("value", sa.String, nullable=False),
        sqlite_with_rowid=False,
    )
    for table in ("metrics_value", "metrics_param", "metrics_tag"):
        op.create_index(f"{table}_run", table, ["run_id"])
