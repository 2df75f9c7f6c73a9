"""Jobs of one name are numbered: digits#7 is the 7th job of that name."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_NUMBERED = """
UPDATE jobs SET number = numbered.number
FROM (SELECT id, row_number() OVER (PARTITION BY workspace, name ORDER BY id) AS number FROM jobs) AS numbered
WHERE numbered.id = jobs.id"""
_COUNTED = """
INSERT INTO job_numbers (workspace, name, newest)
SELECT workspace, name, max(number) FROM jobs GROUP BY workspace, name"""


def upgrade() -> None:
    op.add_column("jobs", sa.Column("number", sa.Integer(), nullable=False, server_default="0"))
    op.create_table(
        "job_numbers",
        sa.Column("workspace", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("newest", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("workspace", "name"),
    )
    op.execute(_NUMBERED)
    op.execute(_COUNTED)
    op.create_index("jobs_by_number", "jobs", ["workspace", "name", "number"], unique=True)
