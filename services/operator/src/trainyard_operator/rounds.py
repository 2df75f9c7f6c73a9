"""What has no events of its own is looked at in rounds: how far running jobs are, and why queued ones wait.

A job is looked at once in an interval, all jobs together so many a second. A status that says the same is not written.
"""

from __future__ import annotations

import asyncio
import logging
import time

from trainyard.cluster import Limiter
from trainyard.errors import YardError

from trainyard_operator import progress, status
from trainyard_operator.controller import Controller
from trainyard_operator.roster import Tracked
from trainyard_operator.settings import Settings
from trainyard_operator.yard import Yard

logger = logging.getLogger(__name__)

_TICK_S = 1.0


class Rounds:
    """Looks at jobs that are not over."""

    def __init__(self, controller: Controller, yard: Yard, settings: Settings) -> None:
        self._controller = controller
        self._yard = yard
        self._interval_s = settings.progress_interval_s
        self._limiter = Limiter(settings.progress_per_s, max(1, round(settings.progress_per_s)))

    async def run(self) -> None:
        """For ever."""
        asked = float("-inf")
        while True:
            try:
                await self._look_at_running()
                if time.monotonic() - asked >= self._interval_s:
                    asked = time.monotonic()
                    await self._look_at_queued()
            except YardError as error:
                logger.info("no progress is known", extra={"why": str(error)})
            await asyncio.sleep(_TICK_S)

    async def _look_at_running(self) -> None:
        due = time.monotonic() - self._interval_s
        running = [each for each in self._controller.roster if each.phase == status.RUNNING and each.looked <= due]
        for tracked in sorted(running, key=lambda each: each.looked):
            await self._limiter.admit()
            tracked.looked = time.monotonic()
            fields = await self._far(tracked)
            if tracked.phase == status.RUNNING:  # still, after the calls
                self._say(tracked, fields)

    async def _far(self, tracked: Tracked) -> status.Fields:
        far = progress.of_progress(await self._yard.progress(tracked.job_id))
        return far | await self._controller.best(tracked)

    async def _look_at_queued(self) -> None:
        if not any(each.phase == status.QUEUED for each in self._controller.roster):
            return
        async for job in self._yard.queued():
            tracked = self._controller.roster.of_job(job.id)
            if tracked is None or tracked.phase != status.QUEUED or not job.pending.reason:
                continue
            fields = status.of_pending(job.pending)
            if status.changes(fields, tracked.wanted):
                await self._limiter.admit()
                self._say(tracked, fields)

    def _say(self, tracked: Tracked, fields: status.Fields) -> None:
        if status.changes(fields, tracked.wanted):
            tracked.say(fields, status.now())
            self._controller.queue.add(tracked.resource.uid)
