"""Launchers announce their machines, and fall silent."""

from __future__ import annotations

import json
from collections.abc import Mapping

import sqlalchemy
from servicekit.errors import AlreadyExists

from trainyard_scheduler.domain.admission import Amount
from trainyard_scheduler.domain.reasons import EventType
from trainyard_scheduler.domain.states import AttemptState
from trainyard_scheduler.index import LivePool
from trainyard_scheduler.ledger import SCHEDULER, Transaction
from trainyard_scheduler.tables import ATTEMPTS, POOLS, Pool
from trainyard_scheduler.transitions.steps import close_attempt, enqueue


def register(
    tx: Transaction,
    name: str,
    launcher_id: str,
    machines: Mapping[str, Amount],
    others: Mapping[str, Amount],
    lease_s: float,
) -> None:
    """Stores what a launcher announced.

    Args:
        machines: what each has for jobs.
        others: what others hold beside, of those where they hold something.

    Raises:
        AlreadyExists: another launcher has the pool and is alive.
    """
    row = tx.connection.execute(sqlalchemy.select(POOLS).where(POOLS.c.name == name)).first()
    if row is not None and row.alive and row.launcher_id != launcher_id:
        raise AlreadyExists(
            f"launcher '{row.launcher_id}' has the pool '{name}' and is alive",
            reason="PoolTaken",
            hint="give this launcher's pool a name of its own, or stop the other launcher",
        )
    values = {
        "launcher_id": launcher_id,
        "machines": json.dumps({machine: [*size, *others.get(machine, ())] for machine, size in machines.items()}),
        "lease_s": lease_s,
        "alive": True,
        "seen_ns": tx.now_ns,
    }
    if row is None:
        tx.connection.execute(sqlalchemy.insert(POOLS), {"name": name, **values})
    else:
        tx.connection.execute(sqlalchemy.update(POOLS).where(POOLS.c.name == name).values(values))
    whole = "; ".join(f"{machine}: {size}" for machine, size in list(machines.items())[:10])
    tx.pool_event(name, EventType.POOL_REGISTERED, f"launcher/{launcher_id}", whole)
    total = dict(machines)
    now_ns = tx.now_ns
    tx.after_commit(
        lambda index: index.set_pool(
            LivePool(name, launcher_id, lease_s, total, dict(total), True, now_ns, others=dict(others))
        )
    )


def lose(tx: Transaction, name: str, lease_s: float) -> None:
    """A pool was not heard of for its lease: it takes no new work; what runs there goes on."""
    tx.connection.execute(sqlalchemy.update(POOLS).where(POOLS.c.name == name).values(alive=False))
    tx.pool_event(name, EventType.POOL_LOST, SCHEDULER, f"its launcher was not heard of for {lease_s:g} s")
    tx.after_commit(lambda index: index.lose_pool(name))
    _withdraw_unclaimed(tx, name)


def _withdraw_unclaimed(tx: Transaction, pool: str) -> None:
    """What nobody took goes back to the queue: another pool may run it, and a late claim finds it over."""
    waiting = (ATTEMPTS.c.state == AttemptState.CREATED) & (ATTEMPTS.c.pool == pool)
    tx.load(list(tx.connection.execute(sqlalchemy.select(ATTEMPTS.c.id).where(waiting)).scalars()))
    for attempt in tx.loaded_attempts():
        job = tx.job(attempt.job_id)
        if job is not None:
            close_attempt(tx, job, attempt, tx.now_ns, EventType.POOL_LOST)
            enqueue(tx, job)
            job.reason, job.message = (
                EventType.POOL_LOST,
                f"the launcher of pool '{pool}' was lost before it took the job",
            )
            tx.event(job, EventType.REQUEUED, SCHEDULER, job.reason, job.message)


def read_pool(row: Pool) -> LivePool:
    """A stored pool. Its lease starts anew: who watched was away, not the launcher."""
    stored = json.loads(row.machines)
    total = {machine: Amount(*sizes[:3]) for machine, sizes in stored.items()}
    others = {machine: Amount(*sizes[3:]) for machine, sizes in stored.items() if sizes[3:]}
    return LivePool(row.name, row.launcher_id, row.lease_s, total, dict(total), row.alive, row.seen_ns, others=others)
