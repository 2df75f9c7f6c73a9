"""Launchers announce their machines, and fall silent."""

from __future__ import annotations

import json
from collections.abc import Iterable

import sqlalchemy
from servicekit.errors import AlreadyExists
from trainyard_protos.v1 import scheduler_pb2

from trainyard_scheduler.domain.admission import Offer
from trainyard_scheduler.domain.reasons import EventType
from trainyard_scheduler.domain.states import AttemptState
from trainyard_scheduler.index import Index
from trainyard_scheduler.ledger import SCHEDULER, Transaction
from trainyard_scheduler.live_pools import LivePool
from trainyard_scheduler.offers import read_offer
from trainyard_scheduler.tables import ATTEMPTS, POOLS, Pool
from trainyard_scheduler.transitions.steps import close_attempt, enqueue

_SHOWN = 10


def register(tx: Transaction, request: scheduler_pb2.RegisterPoolRequest, offer: Offer) -> None:
    """Stores what a launcher announced.

    Args:
        offer: as `read_offer` reads it from the request.

    Raises:
        AlreadyExists: another launcher has the pool and is alive.
    """
    name, launcher_id, lease_s = request.pool, request.launcher_id, request.lease_s
    row = tx.connection.execute(sqlalchemy.select(POOLS).where(POOLS.c.name == name)).first()
    if row is not None and row.alive and row.launcher_id != launcher_id:
        raise AlreadyExists(
            f"launcher '{row.launcher_id}' has the pool '{name}' and is alive",
            reason="PoolTaken",
            hint="give this launcher's pool a name of its own, or stop the other launcher",
        )
    values = {
        "launcher_id": launcher_id,
        "announced": request.SerializeToString(),
        "lease_s": lease_s,
        "alive": True,
        "seen_ns": tx.now_ns,
    }
    if row is None:
        tx.connection.execute(sqlalchemy.insert(POOLS), {"name": name, "blocked": "{}", **values})
    else:
        tx.connection.execute(sqlalchemy.update(POOLS).where(POOLS.c.name == name).values(values))
    tx.pool_event(name, EventType.POOL_REGISTERED, f"launcher/{launcher_id}", _in_words(offer))
    now_ns = tx.now_ns
    tx.after_commit(lambda index: index.set_pool(LivePool(name, launcher_id, lease_s, offer, True, now_ns)))


def _in_words(offer: Offer) -> str:
    machines = [f"{name}: {machine.total}" for name, machine in list(offer.machines.items())[:_SHOWN]]
    kinds = [f"up to {kind.max} of kind '{kind.name}': {kind.total}" for kind in list(offer.kinds.values())[:_SHOWN]]
    return "; ".join(machines + kinds)


def block(tx: Transaction, pool: str, kinds: Iterable[str], until_ns: int) -> None:
    """No machine of these kinds came in time: none is waited for until then."""
    names = list(kinds)
    stored = tx.connection.scalar(sqlalchemy.select(POOLS.c.blocked).where(POOLS.c.name == pool))
    if stored is None:
        return
    known = {kind: due for kind, due in json.loads(stored).items() if due > tx.now_ns}
    blocked = json.dumps(known | dict.fromkeys(names, until_ns))
    tx.connection.execute(sqlalchemy.update(POOLS).where(POOLS.c.name == pool).values(blocked=blocked))

    def effect(index: Index) -> None:
        for kind in names:
            index.block(pool, kind, until_ns)

    tx.after_commit(effect)


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
    offer = read_offer(scheduler_pb2.RegisterPoolRequest.FromString(row.announced))
    blocked_until_ns = {kind: due for kind, due in json.loads(row.blocked).items() if kind in offer.kinds}
    return LivePool(row.name, row.launcher_id, row.lease_s, offer, row.alive, row.seen_ns, blocked_until_ns)
