"""What a launcher announced of its pool, as it said it; jobs that are not over keep where they may run."""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op
from trainyard_protos.v1 import common_pb2, scheduler_pb2

revision = "0004"
down_revision = "0003"

_OVER = (6, 7, 8)  # succeeded, failed, cancelled: a user's retry of those takes any machine


def upgrade() -> None:
    with op.batch_alter_table("pools") as pools:
        pools.add_column(sa.Column("announced", sa.LargeBinary(), nullable=False, server_default=sa.text("''")))
        pools.add_column(sa.Column("blocked", sa.String(), nullable=False, server_default="{}"))
    _convert_pools(op.get_bind())
    with op.batch_alter_table("pools") as pools:
        pools.alter_column("announced", server_default=None)
        pools.alter_column("blocked", server_default=None)
        pools.drop_column("machines")
    _keep_placement(op.get_bind())


def _convert_pools(connection: sa.Connection) -> None:
    table = sa.table(
        "pools", *(sa.column(name) for name in ("name", "launcher_id", "machines", "lease_s", "announced"))
    )
    for row in connection.execute(sa.select(table)).all():
        request = scheduler_pb2.RegisterPoolRequest(pool=row.name, launcher_id=row.launcher_id, lease_s=row.lease_s)
        for name, sizes in json.loads(row.machines).items():
            others = _resources(sizes[3:]) if sizes[3:] else None
            request.machines.add(name=name, total=_resources(sizes[:3]), others=others)
        update = sa.update(table).where(table.c.name == row.name)
        connection.execute(update.values(announced=request.SerializeToString()))


def _resources(sizes: list[int]) -> common_pb2.Resources:
    cpu_milli, memory_bytes, gpu = sizes
    return common_pb2.Resources(cpu=cpu_milli / 1000, memory_bytes=memory_bytes, gpu=gpu)


def _keep_placement(connection: sa.Connection) -> None:
    jobs = sa.table("jobs", *(sa.column(name) for name in ("id", "state", "policy")))
    documents = sa.table("documents", sa.column("job_id"), sa.column("spec"))
    asks = documents.c.spec.like('%"kubernetes"%')
    query = sa.select(jobs.c.id, jobs.c.policy, documents.c.spec).join(documents, documents.c.job_id == jobs.c.id)
    for row in connection.execute(query.where(jobs.c.state.not_in(_OVER), asks)).all():
        found = _placement(json.loads(row.spec).get("spec", {}).get("kubernetes") or {})
        if any(found.values()):
            policy = json.dumps(json.loads(row.policy) | {"placement": found})
            connection.execute(sa.update(jobs).where(jobs.c.id == row.id).values(policy=policy))


def _placement(kubernetes: dict[str, Any]) -> dict[str, Any]:
    tolerations = [
        [each.get("key") or "", each.get("operator") or "Equal", each.get("value") or "", each.get("effect") or ""]
        for each in kubernetes.get("tolerations") or ()
    ]
    selector = sorted((kubernetes.get("nodeSelector") or {}).items())
    return {"selector": selector, "tolerations": tolerations, "topology": kubernetes.get("topology") or ""}
