"""Runs in the order in which they were made."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_index("metrics_run_newest", "metrics_run", ["workspace", "created_ns", "id"])
