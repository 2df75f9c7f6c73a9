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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from trainyard_scheduler.domain.admission import NOTHING, Amount, Demand, place, take
from trainyard_scheduler.domain.pending import (
    Pending,
    PoolView,
    backoff,
    can_ever_fit,
    can_fit,
    no_room_anywhere,
    waiting,
)
from trainyard_scheduler.domain.states import JobState
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
    OTHERS = "others"  # others than jobs hold what it needs
    LARGER_POOL = "larger pool"  # no pool that is alive could ever hold it


class Holding(NamedTuple):
    """What an attempt holds until it is over."""

    pool: str
    machines: tuple[str, ...]
    node: Amount
    created_ns: int


class Admission(NamedTuple):
    """A job and the machines of its nodes."""

    job_id: str
    pool: str
    machines: tuple[str, ...]


@dataclass(slots=True)
class LivePool:
    """A pool as it was last announced."""

    name: str
    launcher_id: str
    lease_s: float
    total: dict[str, Amount]
    free: dict[str, Amount]
    alive: bool
    seen_ns: int
    last_claim_ns: int = 0
    newest_claimed_ns: int = 0  # creation time of the newest attempt that was claimed
    others: dict[str, Amount] = field(default_factory=dict)  # what others than jobs hold, beside `total`

    def view(self) -> PoolView:
        return PoolView(self.name, self.alive, self.total, self.free, self.others)


_Rank = tuple[int, str]  # (-priority, id): ids sort by age


class Index:
    """The queue, the pools and what is held of them."""

    def __init__(self, clock: Callable[[], int]) -> None:
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
        demand = self._demands.setdefault(demand, demand)
        now_ns = self.clock()
        later_ns = not_before_ns if not_before_ns > now_ns else 0
        self._waiting[job_id] = Waiting(priority, demand, later_ns, sys.intern(queue), since_ns or now_ns)
        if later_ns:
            self.timers.set(TimerKind.BACKOFF, job_id, later_ns)
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
            views = self._views()
            lacking = Wait.OTHERS if can_ever_fit(demand, views) else Wait.LARGER_POOL
            known = self._waits_for[demand] = Wait.ROOM if can_fit(demand, views) else lacking
        return known

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
        free = {name: dict(pool.free) for name, pool in self.pools.items() if pool.alive}
        admissions: list[Admission] = []
        for _, job_id in self._ready:
            admission = self._fit(job_id, self._waiting[job_id].demand, free)
            if admission is None:
                break
            admissions.append(admission)
            if len(admissions) == limit:
                break
        return admissions

    def _fit(self, job_id: str, demand: Demand, free: dict[str, dict[str, Amount]]) -> Admission | None:
        for pool, room in free.items():
            machines = place(demand, room)
            if machines is not None:
                take(room, machines, demand.node)
                return Admission(job_id, pool, machines)
        return None

    def hold(self, attempt_id: str, holding: Holding) -> None:
        """An attempt was admitted."""
        self._holding[attempt_id] = holding
        live = self.pools.get(holding.pool)
        if live is not None:
            _take_known(live, holding)

    def release(self, attempt_id: str) -> None:
        """An attempt is over."""
        self.timers.cancel(TimerKind.RECLAIM, attempt_id)
        self.timers.cancel(TimerKind.FINALIZE, attempt_id)
        holding = self._holding.pop(attempt_id, None)
        pool = self.pools.get(holding.pool) if holding else None
        if holding is None or pool is None:
            return
        for machine in holding.machines:
            if machine in pool.free:
                pool.free[machine] = pool.free[machine].plus(holding.node)
        self.changed.set()

    # Pools

    def set_pool(self, pool: LivePool) -> None:
        """A pool was announced for the first time, or differently."""
        before = self.pools.get(pool.name)
        if before is not None:
            pool.last_claim_ns, pool.newest_claimed_ns = before.last_claim_ns, before.newest_claimed_ns
        pool.free = dict(pool.total)
        for holding in self._holding.values():
            if holding.pool == pool.name:
                _take_known(pool, holding)
        self.pools[pool.name] = pool
        self._sort_anew()
        self.renew(pool.name)

    def renew(self, name: str) -> None:
        """A pool was heard of."""
        pool = self.pools[name]
        pool.seen_ns = self.clock()
        self.timers.set(TimerKind.LEASE, name, pool.seen_ns + int(pool.lease_s * 1e9))

    def lose_pool(self, name: str) -> None:
        """A pool was not heard of for its lease: it takes no new work."""
        self.pools[name].alive = False
        self._sort_anew()

    def totals(self) -> tuple[Amount, Amount]:
        """What is free, and what there is, on all machines of pools that are alive."""
        free = total = NOTHING
        for pool in self.pools.values():
            if pool.alive:
                free = _sum(free, pool.free.values())
                total = _sum(total, pool.total.values())
        return free, total

    def _views(self) -> list[PoolView]:
        return [pool.view() for pool in self.pools.values()]

    def claimed(self, pool: str, created_ns: int, now_ns: int) -> None:
        """A launcher of the pool took an attempt that was created then."""
        live = self.pools.get(pool)
        if live is not None:
            live.last_claim_ns = now_ns
            live.newest_claimed_ns = max(live.newest_claimed_ns, created_ns)

    def message_was_lost(self, attempt_id: str, patience_ns: int) -> bool:
        """Whether an unclaimed attempt's message must be lost.

        Launchers take messages in order: so either a younger attempt was taken, or none was for a while. Otherwise the
        message stands behind others, and a second one would only join them.
        """
        holding = self._holding.get(attempt_id)
        live = self.pools.get(holding.pool) if holding else None
        if holding is None or live is None or not live.alive:
            return False
        return holding.created_ns < live.newest_claimed_ns or self.clock() - live.last_claim_ns >= patience_ns

    # Expiry

    def expire_at(self, due_ns: int) -> None:
        """Some ended job is to be removed then; the table knows which."""
        known = self.timers.due_ns(TimerKind.EXPIRY, "")
        if known is None or due_ns < known:
            self.timers.set(TimerKind.EXPIRY, "", due_ns)

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
        if job.not_before_ns:
            return backoff(job.not_before_ns, self.clock())
        return self.would_wait(job.demand, self.jobs_ahead(job.priority, job_id))

    def would_wait(self, demand: Demand, jobs_ahead: int) -> Pending:
        """Why a job with so many others ahead would not run."""
        views = self._views()
        if self._wait(demand) is not Wait.ROOM:
            return no_room_anywhere(demand, views)
        return waiting(demand, views, jobs_ahead)

    def fits_empty(self, demand: Demand) -> tuple[str, ...]:
        """Where a job goes when the yard is empty; () when it does not fit then."""
        for pool in self.pools.values():
            machines = place(demand, pool.total) if pool.alive else None
            if machines is not None:
                return machines
        return ()

    def moved(self, old: JobState | None, new: JobState | None) -> None:
        """Counts jobs by state; None for not there."""
        if old is not None:
            self.states[old] -= 1
        if new is not None:
            self.states[new] += 1


def _take_known(pool: LivePool, holding: Holding) -> None:
    # A machine may have left the pool while an attempt of it still counts.
    take(pool.free, tuple(machine for machine in holding.machines if machine in pool.free), holding.node)


def _sum(start: Amount, amounts: Iterable[Amount]) -> Amount:
    return functools.reduce(Amount.plus, amounts, start)
