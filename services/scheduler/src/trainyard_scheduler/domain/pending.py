"""Why a queued job waits, with numbers, and what would change it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from trainyard_scheduler.domain.admission import (
    NOTHING,
    Amount,
    Demand,
    Machine,
    Offer,
    Room,
    eligible,
    kind_of,
    place,
)
from trainyard_scheduler.domain.matching import Taint, selected, untolerated
from trainyard_scheduler.domain.reasons import PendingReason

_MACHINES_SHOWN = 5
_NS_PER_S = 1e9


class Pending(NamedTuple):
    """As `Pending` in scheduler.proto."""

    reason: PendingReason = PendingReason.NONE
    message: str = ""
    not_before_ns: int = 0

    @property
    def never_fits(self) -> bool:
        return self.reason is PendingReason.NEVER_FITS


class PoolView(NamedTuple):
    """A pool as admission sees it."""

    name: str
    alive: bool
    offer: Offer
    room: Room  # without machines of kinds that are blocked
    blocked_until_ns: Mapping[str, int] = {}  # kinds of which no machine came in time lately


def can_fit(demand: Demand, pools: Sequence[PoolView]) -> bool:
    """Whether some pool that is alive would hold the job if it had no others."""
    return any(pool.alive and place(demand, pool.offer, _empty(pool)) is not None for pool in pools)


def can_ever_fit(demand: Demand, pools: Sequence[PoolView]) -> bool:
    """Whether some pool that is alive would hold the job if its machines were empty."""
    return any(pool.alive and _ever(demand, pool) is not None for pool in pools)


def can_fit_later(demand: Demand, pools: Sequence[PoolView]) -> bool:
    """Whether some pool that is alive would hold the job if it had no others and no kind were blocked."""
    return any(pool.alive and place(demand, pool.offer, Room.whole(pool.offer)) is not None for pool in pools)


def _empty(pool: PoolView) -> Room:
    room = Room.whole(pool.offer)
    room.more.update(dict.fromkeys(pool.blocked_until_ns, 0))
    return room


def _ever(demand: Demand, pool: PoolView) -> tuple[str, ...] | None:
    return place(demand, pool.offer, Room.whole(pool.offer, others_gone=True))


def backoff(not_before_ns: int, now_ns: int) -> Pending:
    """A retry that has to wait."""
    seconds = max(0.0, (not_before_ns - now_ns) / _NS_PER_S)
    return Pending(PendingReason.BACKOFF, f"retries in {seconds:.1f} s", not_before_ns)


def avoiding(machines: Iterable[str], until_ns: int, now_ns: int) -> Pending:
    """A job that only fits on machines on which the cluster did not take its pods."""
    names = ", ".join(f"'{name}'" for name in sorted(machines)[:_MACHINES_SHOWN])
    return Pending(
        PendingReason.BACKOFF,
        f"it avoids {names}, where its last attempt got or kept no place, for another {_left(until_ns, now_ns)}; "
        "'kubectl describe node' shows what these machines have left",
        until_ns,
    )


def awaiting(pool: str, kinds: Mapping[str, int], nodes: int, until_ns: int, now_ns: int) -> Pending:
    """An admitted job whose machines do not exist yet.

    Args:
        kinds: how many of its nodes wait for a machine of each kind.
        nodes: of the job.
    """
    of = " and ".join(f"{count} of {nodes} nodes for a machine of kind '{kind}'" for kind, count in kinds.items())
    return Pending(
        PendingReason.WAITING_FOR_MACHINES,
        f"pool '{pool}' has to grow: it waits with {of}; {_left(until_ns, now_ns)} left before the job returns to its "
        "place in the queue",
        until_ns,
    )


def no_yard() -> Pending:
    """A job that is only looked at, while no yard admits jobs."""
    return Pending(PendingReason.NO_YARD, "no yard is running: 'yard up' starts one, and this job with it")


def no_room_anywhere(demand: Demand, pools: Sequence[PoolView], now_ns: int) -> Pending:
    """A job that no pool alive would hold if it had no others."""
    for pool in pools:
        if not pool.alive and _ever(demand, pool) is not None:
            return Pending(
                PendingReason.NO_POOL,
                f"pool '{pool.name}' could run it but its launcher has not been heard of: start it again",
            )
    alive = [pool for pool in pools if pool.alive]
    if not alive:
        return Pending(
            PendingReason.NO_POOL, "no machines are registered: start a launcher ('yard up' on this machine has one)"
        )
    for pool in alive:
        machines = place(demand, pool.offer, Room.whole(pool.offer))
        if machines is not None:
            return _blocked(pool, machines, now_ns)
    if not any(pool.offer.machines or pool.offer.kinds for pool in alive):
        names = ", ".join(f"'{pool.name}'" for pool in alive)
        return Pending(
            PendingReason.NO_POOL,
            f"no machine of {names} can be used now: it starts when one can (on a cluster, see 'kubectl get nodes')",
        )
    for pool in alive:
        if (machines := _ever(demand, pool)) is not None:
            return Pending(PendingReason.ROOM_HELD_BY_OTHERS, _held(demand, pool, machines))
    for pool in alive:
        offer = pool.offer.mended
        if offer != pool.offer and (machines := place(demand, offer, Room.whole(offer, others_gone=True))) is not None:
            names = ", ".join(f"'{name}'" for name in dict.fromkeys(machines) if name in pool.offer.unusable)
            return Pending(
                PendingReason.NO_POOL,
                f"needs {_needed(demand, offer)}; it starts when {names} of pool '{pool.name}' can be used again, and "
                "blocks no other job ('kubectl get nodes' shows which are not ready or cordoned)",
            )
    return Pending(PendingReason.NEVER_FITS, _never_fits(demand, alive))


def _blocked(pool: PoolView, machines: Iterable[str], now_ns: int) -> Pending:
    kinds = [kind for kind in dict.fromkeys(map(kind_of, machines)) if kind in pool.blocked_until_ns]
    until_ns = max((pool.blocked_until_ns[kind] for kind in kinds), default=now_ns)
    names = ", ".join(f"'{kind}'" for kind in kinds)
    return Pending(
        PendingReason.WAITING_FOR_MACHINES,
        f"it needs machines of kind {names}, of which none came in time when they were last waited for: tried again in "
        f"{_left(until_ns, now_ns)}; 'kubectl describe pod' of a pending pod shows what the cluster's autoscaler says",
        until_ns,
    )


def _held(demand: Demand, pool: PoolView, machines: Sequence[str]) -> str:
    found = pool.offer.machines
    held = {name: found[name].others for name in machines if name in found and found[name].others != NOTHING}
    has = "; ".join(f"{size} of '{name}'" for name, size in list(held.items())[:_MACHINES_SHOWN])
    return (
        f"needs {_needed(demand, pool.offer)}; pool '{pool.name}' would hold it without the pods of others, which have "
        f"{has}: it starts when they leave enough, and blocks no other job; 'kubectl describe node "
        f"{next(iter(held))}' lists them"
    )


def _never_fits(demand: Demand, pools: Sequence[PoolView]) -> str:
    sizes = [(name, pool, size) for pool in pools for name, size in _accepting(demand, pool)]
    if not sizes:
        return f"needs {demand}; {_refused(demand, pools)}"
    machine, pool, size = max(sizes, key=lambda entry: (entry[2].gpu >= demand.node.gpu, entry[2]))
    needed = pool.offer.size(demand)
    whole = (
        f"needs {_needed(demand, pool.offer)}; the largest machine, {machine} of pool '{pool.name}', has {size} in all"
    )
    lacking = [
        name for name, need, has in zip(("cpu", "memory", "gpu", "pods"), needed, size, strict=True) if need > has
    ]
    if lacking:
        return f"{whole}: too much {' and '.join(lacking)} for one node. Lower spec.resources or spec.workersPerNode"
    return (
        f"{whole}: all {demand.nodes} nodes at once do not fit. Lower spec.nodes, spec.resources or spec.workersPerNode"
    )


def _accepting(demand: Demand, pool: PoolView) -> Iterator[tuple[str, Amount]]:
    """The machines and kinds that a job accepts and that accept it, with what each has."""
    offer, among = pool.offer, eligible(demand, pool.offer)
    for name in among.machines:
        yield f"'{name}'", offer.machines[name].total.plus(offer.machines[name].others)
    for kind in among.kinds:
        yield f"one of kind '{kind}'", offer.kinds[kind].total


def _refused(demand: Demand, pools: Sequence[PoolView]) -> str:
    """Which label or toleration no machine is satisfied with."""
    wishes = demand.wishes
    found = [(pool.offer, each) for pool in pools for each in _all(pool.offer)]
    labelled = [(offer, each) for offer, each in found if selected(wishes.selector, each.labels)]
    if not labelled:
        lacking = [pair for pair in wishes.selector if not any(selected([pair], each.labels) for _, each in found)]
        labels = ", ".join(f"{key}={value}" for key, value in lacking or wishes.selector)
        which = "" if len(wishes.selector) == 1 or lacking else " together"
        return f"no machine has {labels}{which}. Change spec.kubernetes.nodeSelector, or label a node"
    taints: dict[Taint, None] = {}
    for offer, each in labelled:
        taints |= dict.fromkeys(untolerated(each.taints, offer.tolerations(demand)))
    names = ", ".join(map(str, list(taints)[:_MACHINES_SHOWN]))
    return (
        f"all machines that would do have taints that it does not tolerate: {names}. Add to spec.kubernetes.tolerations"
    )


def _all(offer: Offer) -> list[Machine]:
    return [*offer.machines.values(), *(Machine(k.total, NOTHING, k.labels, k.taints) for k in offer.kinds.values())]


def waiting(demand: Demand, pools: Sequence[PoolView], jobs_ahead: int, now_ns: int) -> Pending:
    """A job that fits an empty pool: behind others, at the head without room, or about to start."""
    if jobs_ahead:
        others = "1 job" if jobs_ahead == 1 else f"{jobs_ahead} jobs"
        return Pending(
            PendingReason.BEHIND_OTHERS, f"behind {others} of higher priority or greater age; needs {demand}"
        )
    if any(pool.alive and place(demand, pool.offer, pool.room) is not None for pool in pools):
        return Pending(PendingReason.NONE, "starts at once")
    alive = [pool for pool in pools if pool.alive]
    room = "; ".join(text for pool in alive for text in _free(demand, pool, now_ns))
    needed = _needed(demand, alive[0].offer) if len(alive) == 1 else str(demand)
    return Pending(
        PendingReason.WAITING_FOR_CAPACITY, f"next in the queue, waits until running jobs end; needs {needed}, {room}"
    )


def _free(demand: Demand, pool: PoolView, now_ns: int) -> Iterator[str]:
    among = eligible(demand, pool.offer)
    for name in among.machines[:_MACHINES_SHOWN]:
        free = pool.room.free[name]
        full = ", but takes no more pods" if pool.offer.overhead.pods > free.pods else ""
        yield f"'{name}' has {free} free{full}"
    for kind in among.kinds:
        until_ns = pool.blocked_until_ns.get(kind)
        if until_ns is not None:
            yield f"kind '{kind}' is tried again in {_left(until_ns, now_ns)}, since none of its machines came in time"
        else:
            yield f"all {pool.offer.kinds[kind].max} machines of kind '{kind}' are taken"


def _needed(demand: Demand, offer: Offer) -> str:
    if offer.overhead._replace(pods=0) == NOTHING:
        return str(demand)
    return f"{demand}, and {offer.overhead} for the agent of each"


def _left(until_ns: int, now_ns: int) -> str:
    seconds = max(0, round((until_ns - now_ns) / _NS_PER_S))
    return f"{seconds} s" if seconds < 120 else f"{round(seconds / 60)} min"
