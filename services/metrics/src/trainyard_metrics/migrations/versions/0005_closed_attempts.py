"""Attempts that are over, and writers whose records are still to be delivered."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("metrics_fence", sa.Column("closed", sa.Integer, nullable=False, server_default="-1"))
    op.create_table(
        "metrics_undelivered",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("writers", sa.Text, nullable=False),
    )
