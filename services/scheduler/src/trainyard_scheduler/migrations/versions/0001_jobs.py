"""Jobs, attempts, events, pools, and what waits to be sent."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "attempts",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("pool", sa.String(), nullable=False),
        sa.Column("machines", sa.String(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("launcher_id", sa.String(), nullable=False),
        sa.Column("stop_reason", sa.String(), nullable=False),
        sa.Column("claimed_ns", sa.BigInteger(), nullable=False),
        sa.Column("started_ns", sa.BigInteger(), nullable=False),
        sa.Column("ended_ns", sa.BigInteger(), nullable=False),
        sa.Column("finalize_by_ns", sa.BigInteger(), nullable=False),
        sa.Column("exit", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("attempts_alive", "attempts", ["state"], unique=False, sqlite_where=sa.text("state != 'ended'"))
    op.create_index(op.f("ix_attempts_job_id"), "attempts", ["job_id"], unique=False)
    op.create_table(
        "documents",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("spec", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("job_id"),
    )
    op.create_table(
        "events",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("workspace", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("object_id", sa.String(), nullable=False),
        sa.Column("object_name", sa.String(), nullable=False),
        sa.Column("time_ns", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("message", sa.String(), nullable=False),
        sa.Column("state", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("events_by_object", "events", ["object_id", "seq"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("workspace", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("owner_kind", sa.String(), nullable=False),
        sa.Column("owner_id", sa.String(), nullable=False),
        sa.Column("queue", sa.String(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("labels", sa.String(), nullable=False),
        sa.Column("idempotency_key", sa.String(), nullable=False),
        sa.Column("nodes", sa.Integer(), nullable=False),
        sa.Column("workers_per_node", sa.Integer(), nullable=False),
        sa.Column("cpu_milli", sa.Integer(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("gpu", sa.Integer(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Integer(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("message", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.String(), nullable=False),
        sa.Column("retries_used", sa.Integer(), nullable=False),
        sa.Column("free_retries_used", sa.Integer(), nullable=False),
        sa.Column("not_before_ns", sa.BigInteger(), nullable=False),
        sa.Column("deadline_ns", sa.BigInteger(), nullable=False),
        sa.Column("updated_ns", sa.BigInteger(), nullable=False),
        sa.Column("started_ns", sa.BigInteger(), nullable=False),
        sa.Column("ended_ns", sa.BigInteger(), nullable=False),
        sa.Column("expires_ns", sa.BigInteger(), nullable=False),
        sa.Column("exit", sa.LargeBinary(), nullable=False),
        sa.Column("rejected_checkpoints", sa.String(), nullable=False),
        sa.Column("event_seq", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("workspace", "idempotency_key", name="jobs_idempotency"),
    )
    op.create_index("jobs_by_expiry", "jobs", ["expires_ns"], unique=False, sqlite_where=sa.text("expires_ns > 0"))
    op.create_index("jobs_by_name", "jobs", ["workspace", "name", "id"], unique=False)
    op.create_index("jobs_by_owner", "jobs", ["workspace", "owner_kind", "owner_id", "id"], unique=False)
    op.create_index("jobs_by_state", "jobs", ["workspace", "state", "id"], unique=False)
    op.create_table(
        "labels",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("value", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "key"),
    )
    op.create_index("labels_by_value", "labels", ["key", "value", "job_id"], unique=False)
    op.create_table(
        "outbox",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("queue", sa.String(), nullable=False),
        sa.Column("task", sa.String(), nullable=False),
        sa.Column("kwargs", sa.String(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "pools",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("launcher_id", sa.String(), nullable=False),
        sa.Column("machines", sa.String(), nullable=False),
        sa.Column("lease_s", sa.Float(), nullable=False),
        sa.Column("alive", sa.Boolean(), nullable=False),
        sa.Column("seen_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )


def downgrade() -> None:
    op.drop_table("pools")
    op.drop_table("outbox")
    op.drop_index("labels_by_value", table_name="labels")
    op.drop_table("labels")
    op.drop_index("jobs_by_state", table_name="jobs")
    op.drop_index("jobs_by_owner", table_name="jobs")
    op.drop_index("jobs_by_name", table_name="jobs")
    op.drop_index("jobs_by_expiry", table_name="jobs", sqlite_where=sa.text("expires_ns > 0"))
    op.drop_table("jobs")
    op.drop_index("events_by_object", table_name="events")
    op.drop_table("events")
    op.drop_table("documents")
    op.drop_index(op.f("ix_attempts_job_id"), table_name="attempts")
    op.drop_index("attempts_alive", table_name="attempts", sqlite_where=sa.text("state != 'ended'"))
    op.drop_table("attempts")
