"""What removed jobs left elsewhere: remembered with the removal, until launchers confirm that it is gone.

Messages only wake the launchers, which ask for the tombstones of their pool when they are woken, when they start, and
from time to time. So nothing is left behind when a message is lost, or a launcher or metrics is away.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy
from servicekit.messages import FORGET, stop_queue
from sqlalchemy import bindparam
from trainyard_protos.v1 import scheduler_pb2

from trainyard_scheduler.ledger import Transaction
from trainyard_scheduler.tables import ARTIFACTS, ATTEMPTS, JOBS, TOMBSTONES, Tombstone
from trainyard_scheduler.transitions.steps import NS_PER_S

_DEFAULT_WORKSPACE = "default"
_RUNS = ""  # in place of a pool: the job's runs in metrics

_INSERT = sqlalchemy.insert(TOMBSTONES)
_DELETE = sqlalchemy.delete(TOMBSTONES).where(
    TOMBSTONES.c.job_id == bindparam("job"), TOMBSTONES.c.pool == bindparam("place")
)


def bury(tx: Transaction, workspaces: Mapping[str, str], used: Sequence[str] | None = None) -> None:
    """Adds the tombstones of jobs that are about to be removed, and wakes their launchers.

    A job that was never admitted left nothing, and gets none.

    Args:
        workspaces: by job id.
        used: references to artifacts that stay where the jobs' checkpoints are removed; None: no artifact is removed.
    """
    tombstones = []
    for (job_id, pool), attempt_ids in _attempts(tx, workspaces).items():
        tombstones.append(_tombstone(tx, workspaces[job_id], job_id, pool, attempt_ids))
        # Launchers of earlier versions act on the message alone, and know the default workspace only.
        more = {} if workspaces[job_id] == _DEFAULT_WORKSPACE else {"workspace": workspaces[job_id]}
        tx.send(stop_queue(pool), FORGET, job_id=job_id, attempt_ids=attempt_ids, **more)
    for job_id in dict.fromkeys(tombstone.job_id for tombstone in tombstones):
        tombstones.append(_tombstone(tx, workspaces[job_id], job_id, _RUNS, []))
        if used is not None:
            tombstones.append(_tombstone(tx, workspaces[job_id], job_id, ARTIFACTS, list(used)))
    _insert(tx, tombstones)


def adopt(tx: Transaction, orphans: Iterable[scheduler_pb2.Tombstone], grace_s: float) -> int:
    """Adds tombstones of jobs that are unknown though they were of this database; returns how many are new.

    A backup that was put back knows nothing of what came after it. Those tombstones are due after a grace time: the
    database may be the wrong one, and the right one, once it is back, has none of them.
    """
    found = {(orphan.job_id, orphan.pool): orphan for orphan in orphans}
    job_ids = {job_id for job_id, _ in found}
    known = set(tx.connection.execute(sqlalchemy.select(JOBS.c.id).where(JOBS.c.id.in_(job_ids))).scalars())
    there = tx.connection.execute(
        sqlalchemy.select(TOMBSTONES.c.job_id, TOMBSTONES.c.pool).where(TOMBSTONES.c.job_id.in_(job_ids))
    )
    buried = {(row.job_id, row.pool) for row in there}
    delay_ns = int(grace_s * NS_PER_S)
    tombstones = [
        _tombstone(tx, orphan.workspace, *key, list(orphan.attempt_ids), delay_ns)
        for key, orphan in found.items()
        if key not in buried and orphan.job_id not in known
    ]
    _insert(tx, tombstones)
    return len(tombstones)


def confirm(tx: Transaction, places: Iterable[tuple[str, str]]) -> None:
    """Removes tombstones; those that are gone already are none of its business.

    Args:
        places: job id and pool of each.
    """
    keys = [{"job": job_id, "place": pool} for job_id, pool in places]
    if keys:
        tx.connection.execute(_DELETE, keys)


def _attempts(tx: Transaction, job_ids: Iterable[str]) -> Mapping[tuple[str, str], list[str]]:
    """Ids of attempts by job and pool."""
    rows = tx.connection.execute(
        sqlalchemy.select(ATTEMPTS.c.job_id, ATTEMPTS.c.pool, ATTEMPTS.c.id).where(ATTEMPTS.c.job_id.in_(job_ids))
    )
    attempts: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for job_id, pool, attempt_id in rows:
        attempts[job_id, pool].append(attempt_id)
    return attempts


def _tombstone(
    tx: Transaction, workspace: str, job_id: str, pool: str, attempt_ids: list[str], delay_ns: int = 0
) -> Tombstone:
    return Tombstone.model_construct(
        job_id=job_id,
        pool=pool,
        workspace=workspace,
        attempt_ids=json.dumps(attempt_ids),
        due_ns=tx.now_ns + delay_ns,
    )


def _insert(tx: Transaction, tombstones: Sequence[Tombstone]) -> None:
    if tombstones:
        tx.connection.execute(_INSERT, [tombstone.__dict__ for tombstone in tombstones])
