"""When versions became the newest of their artifact: until now, as they were made."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("artifact_version", sa.Column("published_ns", sa.BigInteger))
    op.execute("UPDATE artifact_version SET published_ns = created_ns")
