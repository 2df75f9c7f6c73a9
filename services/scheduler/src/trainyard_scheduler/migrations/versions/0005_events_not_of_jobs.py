"""Events that no job takes with it, of which the newest are kept: to be counted without those of jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    others = sa.text("kind != 'Job'")
    op.create_index("events_not_of_jobs", "events", ["seq"], sqlite_where=others, postgresql_where=others)
