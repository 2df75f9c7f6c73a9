"""What removed jobs left elsewhere: remembered with the removal, until launchers confirm that it is gone.

Messages only wake the launchers, which ask for the tombstones of their pool when they are woken, when they start, and
from time to time. So nothing is left behind when a message is lost, or a launcher or metrics is away.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping

import sqlalchemy
from servicekit.celery import FORGET, stop_queue
from sqlalchemy import bindparam

from trainyard_scheduler.ledger import Transaction
from trainyard_scheduler.tables import ATTEMPTS, TOMBSTONES, Tombstone

_DEFAULT_WORKSPACE = "default"
_RUNS = ""  # in place of a pool: the job's runs in metrics

_INSERT = sqlalchemy.insert(TOMBSTONES)
_DELETE = sqlalchemy.delete(TOMBSTONES).where(
    TOMBSTONES.c.job_id == bindparam("job"), TOMBSTONES.c.pool == bindparam("place")
)


def bury(tx: Transaction, workspaces: Mapping[str, str]) -> None:
    """Adds the tombstones of jobs that are about to be removed, and wakes their launchers.

    A job that was never admitted left nothing, and gets none.

    Args:
        workspaces: by job id.
    """
    tombstones = []
    for (job_id, pool), attempt_ids in _attempts(tx, workspaces).items():
        tombstones.append(_tombstone(tx, workspaces[job_id], job_id, pool, attempt_ids))
        # Launchers of earlier versions act on the message alone, and know the default workspace only.
        more = {} if workspaces[job_id] == _DEFAULT_WORKSPACE else {"workspace": workspaces[job_id]}
        tx.send(stop_queue(pool), FORGET, job_id=job_id, attempt_ids=attempt_ids, **more)
    for job_id in dict.fromkeys(tombstone.job_id for tombstone in tombstones):
        tombstones.append(_tombstone(tx, workspaces[job_id], job_id, _RUNS, []))
    if tombstones:
        tx.connection.execute(_INSERT, [tombstone.__dict__ for tombstone in tombstones])


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


def _tombstone(tx: Transaction, workspace: str, job_id: str, pool: str, attempt_ids: list[str]) -> Tombstone:
    return Tombstone.model_construct(
        job_id=job_id, pool=pool, workspace=workspace, attempt_ids=json.dumps(attempt_ids), due_ns=tx.now_ns
    )
