"""The index, from the database: at start, after any end of the process before."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy
from sqlmodel import Session

from trainyard_scheduler.domain.admission import Amount, Demand
from trainyard_scheduler.domain.states import ACTIVE, AttemptState, JobState
from trainyard_scheduler.index import Index
from trainyard_scheduler.live_pools import Holding
from trainyard_scheduler.policy import read_policy
from trainyard_scheduler.tables import ATTEMPTS, DATABASE_ID, JOBS, POOLS, Pool
from trainyard_scheduler.timers import TimerKind
from trainyard_scheduler.transitions.pools import read_pool
from trainyard_scheduler.transitions.steps import NS_PER_S


def rebuild(session: Session, index: Index) -> None:
    """Fills an empty index. Leases start anew, deadlines do not; what nobody claimed is announced again."""
    index.database_id = session.connection().scalar(sqlalchemy.select(DATABASE_ID.c.id)) or ""
    _pools(session, index)
    _states(session, index)
    _attempts(session, index)
    _queue(session, index)
    _expiry(session, index)


def _pools(session: Session, index: Index) -> None:
    for row in session.connection().execute(sqlalchemy.select(POOLS)):
        index.set_pool(read_pool(Pool.model_construct(**row._mapping)))


def _states(session: Session, index: Index) -> None:
    counts = sqlalchemy.select(JOBS.c.state, sqlalchemy.func.count()).group_by(JOBS.c.state)
    for state, count in session.connection().execute(counts):
        index.states[JobState(state)] = count


def _attempts(session: Session, index: Index) -> None:
    query = sqlalchemy.select(
        *ATTEMPTS.c["id", "pool", "machines", "state", "created_ns", "finalize_by_ns"],
        *JOBS.c["nodes", "workers_per_node", "cpu_milli", "memory_bytes", "gpu", "policy"],
    ).join_from(ATTEMPTS, JOBS, ATTEMPTS.c.job_id == JOBS.c.id)
    for row in session.connection().execute(query.where(ATTEMPTS.c.state != AttemptState.ENDED)):
        _hold(index, row)
        if row.state == AttemptState.CREATED:
            index.timers.after(TimerKind.RECLAIM, row.id, 0)  # its message may have died with us
        if row.state == AttemptState.FINALIZING:
            index.timers.at(TimerKind.FINALIZE, row.id, row.finalize_by_ns)


def _hold(index: Index, row: sqlalchemy.Row[Any]) -> None:
    demand, pool = _demand(row), index.pools.get(row.pool)
    node = pool.offer.size(demand) if pool else demand.node
    holding = Holding(row.pool, tuple(json.loads(row.machines)), node, row.created_ns)
    index.hold(row.id, holding)
    kinds = pool.offer.kinds if pool else {}
    waits_s = [kinds[kind].provision_timeout_s if kind in kinds else 0.0 for kind in holding.awaited]
    if waits_s:
        index.timers.at(TimerKind.PROVISION, row.id, row.created_ns + int(min(waits_s) * NS_PER_S))


def _queue(session: Session, index: Index) -> None:
    alive = sqlalchemy.select(JOBS).where(JOBS.c.state.in_((JobState.QUEUED, *ACTIVE)))
    for row in session.connection().execute(alive):
        if row.state == JobState.QUEUED:
            index.enqueue(
                row.id, row.priority, _demand(row), row.not_before_ns, queue=row.queue, since_ns=row.updated_ns
            )
        if row.deadline_ns:
            index.timers.at(TimerKind.DEADLINE, row.id, row.deadline_ns)


def _expiry(session: Session, index: Index) -> None:
    first = session.connection().scalar(
        sqlalchemy.select(sqlalchemy.func.min(JOBS.c.expires_ns)).where(JOBS.c.expires_ns > 0)
    )
    if first:
        index.expire_at(first)


def _demand(row: sqlalchemy.Row[Any]) -> Demand:
    worker = Amount(row.cpu_milli, row.memory_bytes, row.gpu)
    return Demand(row.nodes, worker.times(row.workers_per_node), read_policy(row.policy).wishes)
