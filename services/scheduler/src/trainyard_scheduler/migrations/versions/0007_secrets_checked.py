"""Whether whoever wrote a job's document may read the Secrets that it names. Earlier jobs were not checked."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("secrets_checked", sa.Integer(), nullable=False, server_default="0"))
