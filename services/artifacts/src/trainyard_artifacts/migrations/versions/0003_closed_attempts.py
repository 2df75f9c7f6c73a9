"""Attempts that are over."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("artifact_fence", sa.Column("closed", sa.Integer, nullable=False, server_default="-1"))
