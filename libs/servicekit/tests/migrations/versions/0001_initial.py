"""Initial tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "note", sa.Column("id", sa.Integer, primary_key=True), sa.Column("text", sa.String, nullable=False, unique=True)
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("queue", sa.String, nullable=False),
        sa.Column("task", sa.String, nullable=False),
        sa.Column("kwargs", sa.String, nullable=False),
        sa.Column("created_ns", sa.BigInteger, nullable=False),
    )
