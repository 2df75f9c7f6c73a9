"""Which database this is: a copy restored from a backup has the same id, one that was made anew another."""

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    table = op.create_table("database_id", sa.Column("id", sa.String(), nullable=False), sa.PrimaryKeyConstraint("id"))
    op.bulk_insert(table, [{"id": str(uuid.uuid4())}])
