"""A job's spec apart from what its script recorded: it was among the params, with the values of `spec.env`."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_RUNS = sa.table(
    "metrics_run", sa.column("id"), sa.column("job_id"), sa.column("params", sa.String), sa.column("spec", sa.String)
)
_OF_JOBS = "SELECT id FROM metrics_run WHERE job_id != ''"
_DOCUMENT = ("apiVersion", "kind", "metadata", "spec")


def upgrade() -> None:
    op.add_column("metrics_run", sa.Column("spec", sa.String, nullable=False, server_default="{}"))
    op.create_table(
        "metrics_spec",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("text", sa.String, nullable=False),
        sa.Column("number", sa.Double, nullable=True),
        sqlite_with_rowid=False,
    )
    op.create_index("metrics_spec_run", "metrics_spec", ["run_id"])
    _divide_index()
    _divide_runs()


def _divide_index() -> None:
    op.execute(
        f"INSERT INTO metrics_spec (key, run_id, text, number) SELECT substr(key, 6), run_id, text, number "
        f"FROM metrics_param WHERE run_id IN ({_OF_JOBS}) AND key LIKE 'spec.%' AND key NOT LIKE 'spec.env.%'"
    )
    op.execute(
        f"INSERT INTO metrics_spec (key, run_id, text, number) SELECT substr(key, 10), run_id, text, number "
        f"FROM metrics_param WHERE run_id IN ({_OF_JOBS}) AND key LIKE 'metadata.labels.%'"
    )
    op.execute(
        f"DELETE FROM metrics_param WHERE run_id IN ({_OF_JOBS}) AND (key IN ('apiVersion', 'kind') "
        "OR key LIKE 'spec.%' OR key LIKE 'metadata.%')"
    )


def _divide_runs() -> None:
    connection = op.get_bind()
    ids = connection.execute(sa.select(_RUNS.c.id).where(_RUNS.c.job_id != "")).scalars().all()
    for run_id in ids:
        params = json.loads(connection.scalar(sa.select(_RUNS.c.params).where(_RUNS.c.id == run_id)) or "{}")
        document = {key: params.pop(key) for key in _DOCUMENT if key in params}
        spec = document.get("spec")
        if not isinstance(spec, dict):
            continue
        env, metadata = spec.pop("env", None), document.get("metadata")
        if isinstance(env, dict) and env:
            spec["env"] = sorted(env)
        if isinstance(metadata, dict) and metadata.get("labels"):
            spec["labels"] = metadata["labels"]
        connection.execute(
            _RUNS.update().where(_RUNS.c.id == run_id).values(params=json.dumps(params), spec=json.dumps(spec))
        )
