"""What removed jobs left elsewhere and nobody has confirmed to be gone."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "tombstones",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("pool", sa.String(), nullable=False),
        sa.Column("workspace", sa.String(), nullable=False),
        sa.Column("attempt_ids", sa.String(), nullable=False),
        sa.Column("due_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "pool"),
    )
