"""Why a queued job waits, with numbers, and what would change it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainyard_scheduler.domain.admission import NOTHING, Amount, Demand, place
from trainyard_scheduler.domain.reasons import PendingReason

_MACHINES_SHOWN = 5


class Pending(NamedTuple):
    """As `Pending` in scheduler.proto."""

    reason: PendingReason = PendingReason.NONE
    message: str = ""
    not_before_ns: int = 0

    @property
    def never_fits(self) -> bool:
        return self.reason is PendingReason.NEVER_FITS


class PoolView(NamedTuple):
    """A pool as admission sees it: room by machine, when it has no jobs and now; and what others than jobs hold."""

    name: str
    alive: bool
    total: Mapping[str, Amount]
    free: Mapping[str, Amount]
    others: Mapping[str, Amount]

    @property
    def whole(self) -> dict[str, Amount]:
        """Room by machine when others are gone too."""
        return {name: size.plus(self.others.get(name, NOTHING)) for name, size in self.total.items()}


def can_fit(demand: Demand, pools: Sequence[PoolView]) -> bool:
    """Whether some pool that is alive would hold the job if it had no others."""
    return any(pool.alive and place(demand, pool.total) is not None for pool in pools)


def can_ever_fit(demand: Demand, pools: Sequence[PoolView]) -> bool:
    """Whether some pool that is alive would hold the job if its machines were empty."""
    return any(pool.alive and place(demand, pool.whole) is not None for pool in pools)


def backoff(not_before_ns: int, now_ns: int) -> Pending:
    """A retry that has to wait."""
    seconds = max(0.0, (not_before_ns - now_ns) / 1e9)
    return Pending(PendingReason.BACKOFF, f"retries in {seconds:.1f} s", not_before_ns)


def no_room_anywhere(demand: Demand, pools: Sequence[PoolView]) -> Pending:
    """A job that no pool alive would hold if it had no others."""
    lost = [pool for pool in pools if not pool.alive]
    for pool in lost:
        if place(demand, pool.whole) is not None:
            return Pending(
                PendingReason.NO_POOL,
                f"pool '{pool.name}' could run it but its launcher has not been heard of: start it again",
            )
    alive = [pool for pool in pools if pool.alive]
    if not alive:
        return Pending(
            PendingReason.NO_POOL, "no machines are registered: start a launcher ('yard up' on this machine has one)"
        )
    if not any(pool.total for pool in alive):
        names = ", ".join(f"'{pool.name}'" for pool in alive)
        return Pending(
            PendingReason.NO_POOL,
            f"no machine of {names} can be used now: it starts when one can (on a cluster, see 'kubectl get nodes')",
        )
    for pool in alive:
        if (machines := place(demand, pool.whole)) is not None:
            return Pending(PendingReason.ROOM_HELD_BY_OTHERS, _held(demand, pool, machines))
    return Pending(PendingReason.NEVER_FITS, _never_fits(demand, alive))


def _held(demand: Demand, pool: PoolView, machines: Sequence[str]) -> str:
    held = {name: pool.others[name] for name in machines if pool.others.get(name, NOTHING) != NOTHING}
    has = "; ".join(f"{size} of '{name}'" for name, size in list(held.items())[:_MACHINES_SHOWN])
    return (
        f"needs {demand}; pool '{pool.name}' would hold it without the pods of others, which have {has}: it starts "
        f"when they leave enough, and blocks no other job; 'kubectl describe node {next(iter(held))}' lists them"
    )


def _never_fits(demand: Demand, pools: Sequence[PoolView]) -> str:
    machine, pool, size = max(
        ((name, pool.name, size) for pool in pools for name, size in pool.whole.items()),
        key=lambda entry: (entry[2].gpu >= demand.node.gpu, entry[2]),
    )
    whole = f"needs {demand}; the largest machine, '{machine}' of pool '{pool}', has {size} in all"
    lacking = [name for name, need, has in zip(("cpu", "memory", "gpu"), demand.node, size, strict=True) if need > has]
    if lacking:
        return f"{whole}: too much {' and '.join(lacking)} for one node. Lower spec.resources or spec.workersPerNode"
    return (
        f"{whole}: all {demand.nodes} nodes at once do not fit. Lower spec.nodes, spec.resources or spec.workersPerNode"
    )


def waiting(demand: Demand, pools: Sequence[PoolView], jobs_ahead: int) -> Pending:
    """A job that fits an empty pool: behind others, at the head without room, or about to start."""
    if jobs_ahead:
        others = "1 job" if jobs_ahead == 1 else f"{jobs_ahead} jobs"
        return Pending(
            PendingReason.BEHIND_OTHERS, f"behind {others} of higher priority or greater age; needs {demand}"
        )
    if any(pool.alive and place(demand, pool.free) is not None for pool in pools):
        return Pending(PendingReason.NONE, "starts at once")
    room = "; ".join(
        f"'{name}' has {size} free"
        for pool in pools
        if pool.alive
        for name, size in list(pool.free.items())[:_MACHINES_SHOWN]
    )
    return Pending(
        PendingReason.WAITING_FOR_CAPACITY, f"next in the queue, waits until running jobs end; needs {demand}, {room}"
    )
