"""Events of administrative changes."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "metrics_event",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("workspace", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("object_id", sa.String, nullable=False),
        sa.Column("object_name", sa.String, nullable=False),
        sa.Column("time_ns", sa.BigInteger, nullable=False),
        sa.Column("actor", sa.String, nullable=False),
        sa.Column("type", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("message", sa.String, nullable=False),
        sa.Column("state", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
    )
    op.create_index("metrics_event_object", "metrics_event", ["object_name", "seq"])
