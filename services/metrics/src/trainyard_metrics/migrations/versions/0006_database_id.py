"""Of which database of a scheduler a run's job is."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("metrics_run", sa.Column("database_id", sa.String, nullable=False, server_default=""))
