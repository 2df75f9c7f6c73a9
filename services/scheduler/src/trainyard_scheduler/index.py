"""What the scheduler keeps in memory: who waits, who holds what, what is due. Rebuilt from the database at start.

It learns of changes only after their commit (see `ledger`). It holds a few hundred bytes for each job that waits or
runs, never a spec.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import sys
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from servicekit.clock import Clock
from trainyard.spec.allowed import AllowedPods

from trainyard_scheduler.domain.admission import (
    NOTHING,
    Amount,
    Demand,
    Room,
    kind_of,
    take,
)
from trainyard_scheduler.domain.pending import (
    Pending,
    PoolView,
    avoiding,
    awaiting,
    backoff,
    can_ever_fit,
    can_fit,
    can_fit_later,
    no_room_anywhere,
    no_yard,
    waiting,
)
from trainyard_scheduler.domain.states import JobState
from trainyard_scheduler.live_pools import Holding, LivePool, first_fit
from trainyard_scheduler.tally import Tally
from trainyard_scheduler.timers import TimerKind, Timers


class Waiting(NamedTuple):
    """A queued job."""

    priority: int
    demand: Demand
    not_before_ns: int
    queue: str
    since_ns: int


class Wait(StrEnum):
    """What a queued job waits for."""

    ROOM = "room"  # it stands in line
    BACKOFF = "backoff"
    MACHINES = "machines"  # those that would do are not tried for a while, since they did not come or not take it
    OTHERS = "others"  # others than jobs hold what it needs
    LARGER_POOL = "larger pool"  # no pool that is alive could ever hold it


class Admission(NamedTuple):
    """A job, the machines of its nodes and what each node takes there."""

    job_id: str
    pool: str
    machines: tuple[str, ...]
    node: Amount
    provision_timeout_s: float = 0.0  # how long it waits for machines that do not exist yet; 0: for none


_Rank = tuple[int, str]  # (-priority, id): ids sort by age


class Index:
    """The queue, the pools and what is held of them.

    Args:
        clock: where time comes from.
        admits: whether queued jobs are admitted; false where jobs are only looked at.
    """

    def __init__(self, clock: Clock, *, admits: bool = True) -> None:
        self._admits = admits
        self.clock = clock
        self.database_id = ""  # of the database that it was rebuilt from
        self.timers = Timers(clock)
        self.pools: dict[str, LivePool] = {}
        self.states: Counter[JobState] = Counter()
        self.tally = Tally()
        self.changed = asyncio.Event()  # set when something may be admitted that could not be before
        self._waiting: dict[str, Waiting] = {}
        self._ready: list[_Rank] = []
        self._aside: dict[str, Wait] = {}  # not in line, since no pool would hold them if it had no other jobs
        self._holding: dict[str, Holding] = {}
        self._demands: dict[Demand, Demand] = {}
        self._avoided: dict[str, dict[str, int]] = {}  # by job: machines that did not take it, and until when
        self._waits_for: dict[Demand, Wait] = {}  # known until pools change

    # Queue

    @property
    def queued(self) -> int:
        """How many jobs wait."""
        return len(self._waiting)

    def enqueue(
        self,
        job_id: str,
        priority: int,
        demand: Demand,
        not_before_ns: int = 0,
        *,
        queue: str = "default",
        since_ns: int = 0,
    ) -> None:
        """A job waits, from now on or since a time."""
        now_ns = self.clock.utc_ns()
        demand = self._avoiding(job_id, demand, now_ns)
        demand = self._demands.setdefault(demand, demand)
        later_ns = not_before_ns if not_before_ns > now_ns else 0
        self._waiting[job_id] = Waiting(priority, demand, later_ns, sys.intern(queue), since_ns or now_ns)
        if later_ns:
            self.timers.at(TimerKind.BACKOFF, job_id, later_ns)
        else:
            self._file(job_id)

    def release_backoff(self, job_id: str) -> None:
        """A job's backoff is over."""
        job = self._waiting.get(job_id)
        if job is not None and job.not_before_ns:
            self._waiting[job_id] = job._replace(not_before_ns=0)
            self._file(job_id)

    def dequeue(self, job_id: str) -> None:
        """A job waits no longer."""
        job = self._waiting.pop(job_id, None)
        if job is None:
            return
        self.timers.cancel(TimerKind.BACKOFF, job_id)
        self._unfile(job_id, job)

    def _unfile(self, job_id: str, job: Waiting) -> None:
        self._aside.pop(job_id, None)
        rank = (-job.priority, job_id)
        at = bisect.bisect_left(self._ready, rank)
        if at < len(self._ready) and self._ready[at] == rank:
            del self._ready[at]
            self.changed.set()

    def _file(self, job_id: str) -> None:
        job = self._waiting[job_id]
        wait = self._wait(job.demand)
        if wait is Wait.ROOM:
            bisect.insort(self._ready, (-job.priority, job_id))
            self.changed.set()
        else:
            self._aside[job_id] = wait

    def _wait(self, demand: Demand) -> Wait:
        known = self._waits_for.get(demand)
        if known is None:
            known = self._waits_for[demand] = self._find_wait(demand)
        return known

    def _find_wait(self, demand: Demand) -> Wait:
        views = self._views()
        if can_fit(demand, views):
            return Wait.ROOM
        if demand.wishes.avoided or can_fit_later(demand, views):
            return Wait.MACHINES
        return Wait.OTHERS if can_ever_fit(demand, views) else Wait.LARGER_POOL

    def _sort_anew(self) -> None:
        """Pools changed: what can fit has changed."""
        self._waits_for = {}
        filed = [job_id for _, job_id in self._ready]
        filed.extend(self._aside)
        self._ready = []
        self._aside = {}
        for job_id in filed:
            job = self._waiting[job_id]
            wait = self._wait(job.demand)
            if wait is Wait.ROOM:
                self._ready.append((-job.priority, job_id))
            else:
                self._aside[job_id] = wait
        self._ready.sort()
        self.changed.set()

    # Admission

    def plan(self, limit: int) -> list[Admission]:
        """Who starts now, in strict order: nobody overtakes a job that waits for room."""
        free = [(pool, pool.open_room()) for pool in self.pools.values() if pool.alive]
        admissions: list[Admission] = []
        for _, job_id in self._ready:
            admission = self._fit(job_id, self._waiting[job_id].demand, free)
            if admission is None:
                break
            admissions.append(admission)
            if len(admissions) == limit:
                break
        return admissions

    def _fit(self, job_id: str, demand: Demand, free: list[tuple[LivePool, Room]]) -> Admission | None:
        found = first_fit(demand, free)
        if found is None:
            return None
        pool, room, machines = found
        node = pool.offer.size(demand)
        take(room, pool.offer, machines, node)
        kinds = {kind for name in machines if (kind := kind_of(name))}
        timeout_s = min((pool.offer.kinds[kind].provision_timeout_s for kind in kinds), default=0.0)
        return Admission(job_id, pool.name, machines, node, timeout_s)

    def hold(self, attempt_id: str, holding: Holding) -> None:
        """An attempt was admitted."""
        if not holding.kinds and holding.awaited:
            holding = holding._replace(kinds=tuple(kind_of(name) for name in holding.machines))
        self._holding[attempt_id] = holding
        live = self.pools.get(holding.pool)
        if live is not None:
            live.take(holding)

    def holding(self, attempt_id: str) -> Holding | None:
        """What an attempt holds; None when it is over."""
        return self._holding.get(attempt_id)

    def move(self, attempt_id: str, machines: tuple[str, ...]) -> None:
        """The cluster put an attempt's nodes on these machines."""
        holding = self._holding.get(attempt_id)
        live = self.pools.get(holding.pool) if holding else None
        if holding is None or live is None or holding.machines == machines:
            return
        self._holding[attempt_id] = moved = holding._replace(machines=machines)
        if not moved.awaited:
            self.timers.cancel(TimerKind.PROVISION, attempt_id)
        live.settle(each for each in self._holding.values() if each.pool == live.name)
        self.changed.set()

    def release(self, attempt_id: str) -> None:
        """An attempt is over."""
        for kind in (TimerKind.RECLAIM, TimerKind.FINALIZE, TimerKind.PROVISION):
            self.timers.cancel(kind, attempt_id)
        holding = self._holding.pop(attempt_id, None)
        pool = self.pools.get(holding.pool) if holding else None
        if holding is None or pool is None:
            return
        pool.give_back(holding)
        self.changed.set()

    # What the cluster does not take

    def avoid(self, job_id: str, machines: Iterable[str], until_ns: int) -> None:
        """The cluster did not take a job's pods on these machines: others are tried until then."""
        self._avoided.setdefault(job_id, {}).update(dict.fromkeys(machines, until_ns))

    def forget(self, job_id: str) -> None:
        """A job is over."""
        self._avoided.pop(job_id, None)
        self.timers.cancel(TimerKind.AVOIDED, job_id)

    def _avoiding(self, job_id: str, demand: Demand, now_ns: int) -> Demand:
        known = self._avoided.get(job_id)
        if known is None:
            return demand
        known = {name: until_ns for name, until_ns in known.items() if until_ns > now_ns}
        if known:
            self._avoided[job_id] = known
            self.timers.at(TimerKind.AVOIDED, job_id, min(known.values()), now_ns)
        else:
            self.forget(job_id)
        return demand._replace(wishes=demand.wishes._replace(avoided=frozenset(known)))

    def try_again(self, job_id: str, due_ns: int) -> None:
        """Machines that did not take a job, and were not to be tried until `due_ns`, may be tried again."""
        job = self._waiting.get(job_id)
        if job is None:
            return
        demand = self._avoiding(job_id, job.demand, due_ns)
        if not job.not_before_ns:
            self._unfile(job_id, job)
        self._waiting[job_id] = job._replace(demand=self._demands.setdefault(demand, demand))
        if not job.not_before_ns:
            self._file(job_id)

    def block(self, pool: str, kind: str, until_ns: int) -> None:
        """No machine of the kind came in time: no attempt waits for one until then."""
        live = self.pools.get(pool)
        if live is not None:
            live.blocked_until_ns[kind] = until_ns
            self.timers.at(TimerKind.BLOCKED, pool, min(live.blocked_until_ns.values()))
            self._sort_anew()

    def unblock(self, pool: str, due_ns: int) -> None:
        """Kinds that were not to be tried until `due_ns` may be tried again."""
        live = self.pools.get(pool)
        if live is None:
            return
        live.blocked_until_ns = {kind: due for kind, due in live.blocked_until_ns.items() if due > due_ns}
        if live.blocked_until_ns:
            self.timers.at(TimerKind.BLOCKED, pool, min(live.blocked_until_ns.values()), due_ns)
        self._sort_anew()

    # Pools

    def set_pool(self, pool: LivePool) -> None:
        """A pool was announced for the first time, or differently."""
        before = self.pools.get(pool.name)
        if before is not None:
            pool.follow(before, self.clock.utc_ns())
        pool.settle(holding for holding in self._holding.values() if holding.pool == pool.name)
        self.pools[pool.name] = pool
        self._sort_anew()
        self.renew(pool.name)
        if pool.blocked_until_ns:
            self.timers.at(TimerKind.BLOCKED, pool.name, min(pool.blocked_until_ns.values()))

    def renew(self, name: str) -> None:
        """A pool was heard of."""
        pool = self.pools[name]
        pool.seen_ns = self.clock.utc_ns()
        self.timers.after(TimerKind.LEASE, name, int(pool.lease_s * 1e9))

    def lose_pool(self, name: str) -> None:
        """A pool was not heard of for its lease: it takes no new work."""
        self.pools[name].alive = False
        self._sort_anew()

    def allowed_pods(self) -> dict[str, AllowedPods | None]:
        """What each pool that is alive allows pods to ask for; None: anything."""
        return {pool.name: pool.offer.allowed_pods for pool in self.pools.values() if pool.alive}

    def totals(self) -> tuple[Amount, Amount]:
        """What is free, and what there is, on all machines of pools that are alive."""
        free = total = NOTHING
        for pool in self.pools.values():
            if pool.alive:
                free = _sum(free, pool.room.free.values())
                total = _sum(total, (machine.total for machine in pool.offer.machines.values()))
        return free, total

    def _views(self) -> list[PoolView]:
        return [pool.view() for pool in self.pools.values()]

    def claimed(self, pool: str, attempt_id: str) -> None:
        """A launcher of the pool took an attempt."""
        live = self.pools.get(pool)
        if live is not None:
            live.last_claim_ns = self.clock.steady_ns()
            live.newest_claimed = max(live.newest_claimed, attempt_id)

    def message_was_lost(self, attempt_id: str, patience_ns: int) -> bool:
        """Whether an unclaimed attempt's message must be lost.

        Launchers take messages in order: so either a younger attempt was taken, or none was for a while. Otherwise the
        message stands behind others, and a second one would only join them.
        """
        holding = self._holding.get(attempt_id)
        live = self.pools.get(holding.pool) if holding else None
        if holding is None or live is None or not live.alive:
            return False
        return attempt_id < live.newest_claimed or self.clock.steady_ns() - live.last_claim_ns >= patience_ns

    # Expiry

    def expire_at(self, due_ns: int) -> None:
        """Some ended job is to be removed then; the table knows which."""
        left_ns = max(0, due_ns - self.clock.past_ns())
        known = self.timers.fires_ns(TimerKind.EXPIRY, "")
        if known is None or self.clock.steady_ns() + left_ns < known:
            self.timers.after(TimerKind.EXPIRY, "", left_ns)

    # Answers

    def waits(self) -> list[tuple[Wait, Waiting]]:
        """Every queued job with what it waits for. Other threads may ask."""
        aside = self._aside
        return [
            (Wait.BACKOFF if job.not_before_ns else aside.get(job_id, Wait.ROOM), job)
            for job_id, job in list(self._waiting.items())
        ]

    def jobs_ahead(self, priority: int, job_id: str) -> int:
        """How many jobs that can run go before this one."""
        return bisect.bisect_left(self._ready, (-priority, job_id))

    def ahead(self, job_id: str, limit: int) -> list[str]:
        """The jobs just ahead of a queued job, the first of the queue first."""
        job = self._waiting.get(job_id)
        if job is None or job_id in self._aside or job.not_before_ns:
            return []
        return [name for _, name in self._ready[: min(limit, self.jobs_ahead(job.priority, job_id))]]

    def position(self, job_id: str) -> int:
        """Place in the queue, 1 = next; 0 when it is not in the line (not queued, backing off, or set aside)."""
        job = self._waiting.get(job_id)
        if job is None or job_id in self._aside or job.not_before_ns:
            return 0
        return self.jobs_ahead(job.priority, job_id) + 1

    def pending(self, job_id: str) -> Pending:
        """Why a queued job is not running."""
        job = self._waiting.get(job_id)
        if job is None:
            return Pending()
        if job.not_before_ns and self._admits:
            return backoff(job.not_before_ns, self.clock.utc_ns())
        if job.demand.wishes.avoided and self._wait(job.demand) is Wait.MACHINES:
            known = self._avoided[job_id]
            return avoiding(known, min(known.values()), self.clock.utc_ns())
        why = self.would_wait(job.demand, self.jobs_ahead(job.priority, job_id))
        return why if self._admits or why.never_fits else no_yard()

    def awaited(self, attempt_id: str) -> Pending:
        """Which machines that do not exist yet an attempt waits for."""
        holding = self._holding.get(attempt_id)
        due_ns = self.timers.due_ns(TimerKind.PROVISION, attempt_id)
        if holding is None or due_ns is None:
            return Pending()
        return awaiting(holding.pool, holding.awaited, len(holding.machines), due_ns, self.clock.utc_ns())

    def would_wait(self, demand: Demand, jobs_ahead: int) -> Pending:
        """Why a job with so many others ahead would not run."""
        views = self._views()
        if self._wait(demand) is not Wait.ROOM:
            return no_room_anywhere(demand, views, self.clock.utc_ns())
        return waiting(demand, views, jobs_ahead, self.clock.utc_ns())

    def fits_empty(self, demand: Demand) -> tuple[str, ...]:
        """Where a job goes when the yard is empty; () when it does not fit then."""
        found = first_fit(demand, [(pool, Room.whole(pool.offer)) for pool in self.pools.values() if pool.alive])
        return found[2] if found is not None else ()

    def moved(self, old: JobState | None, new: JobState | None) -> None:
        """Counts jobs by state; None for not there."""
        if old is not None:
            self.states[old] -= 1
        if new is not None:
            self.states[new] += 1


def _sum(start: Amount, amounts: Iterable[Amount]) -> Amount:
    return functools.reduce(Amount.plus, amounts, start)
