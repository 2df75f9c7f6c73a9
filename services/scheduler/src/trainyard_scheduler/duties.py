"""What the scheduler does on its own: admitting, and acting when timers are due."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterable, Mapping

from prometheus_client import Histogram

from trainyard_scheduler.index import Index
from trainyard_scheduler.ledger import Ledger
from trainyard_scheduler.settings import Settings
from trainyard_scheduler.timers import Handler, TimerKind
from trainyard_scheduler.transitions import expire, pools
from trainyard_scheduler.transitions.admit import admit
from trainyard_scheduler.transitions.steps import NS_PER_S

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


class Admitter:
    """Admits whenever something may fit that did not before. One transaction at a time, so that room is given once."""

    def __init__(self, index: Index, ledger: Ledger, settings: Settings, waited: Histogram) -> None:
        self._index = index
        self._ledger = ledger
        self._settings = settings
        self._waited = waited

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self._index.changed.wait()
            self._index.changed.clear()
            try:
                await self._admit_all()
            except Exception:
                logger.exception("admission failed, trying again")
                await asyncio.sleep(_RETRY_S)
                self._index.changed.set()

    async def _admit_all(self) -> None:
        while plan := self._index.plan(self._settings.admission_batch):
            jobs = await self._ledger.write(
                functools.partial(admit, admissions=plan, reclaim_after_s=self._settings.reclaim_after_s)
            )
            for job in jobs:
                if job.attempt == 1:
                    self._waited.observe((job.updated_ns - job.created_ns) / NS_PER_S)


class TimerDuties:
    """What each kind of timer does."""

    def __init__(self, index: Index, ledger: Ledger, settings: Settings) -> None:
        self._index = index
        self._ledger = ledger
        self._settings = settings
        self._patience_ns = int(settings.reclaim_after_s * NS_PER_S)

    def handlers(self) -> dict[TimerKind, Handler]:
        return {
            TimerKind.BACKOFF: self._backoff,
            TimerKind.DEADLINE: self._deadline,
            TimerKind.FINALIZE: self._finalize,
            TimerKind.RECLAIM: self._reclaim,
            TimerKind.LEASE: self._lease,
            TimerKind.EXPIRY: self._expiry,
            TimerKind.PROVISION: self._provision,
            TimerKind.BLOCKED: self._blocked,
            TimerKind.AVOIDED: self._avoided,
        }

    async def _backoff(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self._index.release_backoff(job_id)

    async def _deadline(self, jobs: Mapping[str, int]) -> None:
        for job_id, due_ns in jobs.items():
            await self._ledger.write(functools.partial(expire.pass_deadline, job_id=job_id, due_ns=due_ns))

    async def _finalize(self, attempts: Mapping[str, int]) -> None:
        for attempt_id, due_ns in attempts.items():
            await self._ledger.write(functools.partial(expire.give_up_storing, attempt_id=attempt_id, due_ns=due_ns))

    async def _reclaim(self, attempt_ids: Iterable[str]) -> None:
        lost = [name for name in attempt_ids if self._index.message_was_lost(name, self._patience_ns)]
        # Set before the write: a claim that comes meanwhile cancels it.
        for attempt_id in attempt_ids:
            self._index.timers.after(TimerKind.RECLAIM, attempt_id, self._patience_ns)
        if lost:
            await self._ledger.write(functools.partial(expire.announce_again, attempt_ids=lost))

    async def _lease(self, names: Iterable[str]) -> None:
        for name in names:
            lease_s = self._index.pools[name].lease_s
            renewed = self._index.timers.fires_ns(TimerKind.LEASE, name) is not None  # while others were stored
            if self._index.pools[name].alive and not renewed:
                await self._ledger.write(functools.partial(pools.lose, name=name, lease_s=lease_s))

    async def _provision(self, attempt_ids: Iterable[str]) -> None:
        block_s = self._settings.kind_retry_s
        for attempt_id in attempt_ids:
            await self._ledger.write(functools.partial(expire.give_up_waiting, attempt_id=attempt_id, block_s=block_s))

    async def _blocked(self, pools: Mapping[str, int]) -> None:
        for name, due_ns in pools.items():
            self._index.unblock(name, due_ns)

    async def _avoided(self, jobs: Mapping[str, int]) -> None:
        for job_id, due_ns in jobs.items():
            self._index.try_again(job_id, due_ns)

    async def _expiry(self, _keys: Iterable[str]) -> None:
        await self._ledger.write(functools.partial(expire.remove_expired, limit=self._settings.expiry_batch))
