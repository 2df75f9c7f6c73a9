"""Runs whose logs were removed because they were old."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("metrics_run", sa.Column("logs_removed", sa.Boolean, nullable=False, server_default=sa.false()))
