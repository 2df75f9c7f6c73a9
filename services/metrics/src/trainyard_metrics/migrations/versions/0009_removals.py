"""Runs that users removed, until nothing of them is left."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table("metrics_removal", sa.Column("run_id", sa.String, primary_key=True))
