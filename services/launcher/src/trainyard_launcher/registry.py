"""The attempts this launcher has, by attempt and by job, and the few newest that ended."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator

from servicekit.errors import FailedPrecondition

from trainyard_launcher.attempts import Attempt


class Registry:
    """Lives on the loop's thread.

    Args:
        recent: how many ended attempts are kept for those who come late to their output.
    """

    def __init__(self, recent: int) -> None:
        self._recent_limit = recent
        self._active: dict[str, Attempt] = {}
        self._newest: dict[str, Attempt] = {}  # by job
        self._recent: OrderedDict[str, Attempt] = OrderedDict()
        self._waiting: dict[str, set[asyncio.Future[Attempt]]] = {}

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._active.values()))

    def get(self, attempt_id: str) -> Attempt | None:
        """An attempt that is not over for the scheduler."""
        return self._active.get(attempt_id)

    def add(self, attempt: Attempt) -> None:
        """Adds an attempt and wakes those who wait for the next one of its job."""
        facts = attempt.facts
        self._active[facts.attempt_id] = attempt
        newest = self._newest.get(facts.job_id)
        if newest is None or newest.facts.fence < facts.fence:
            self._newest[facts.job_id] = attempt
        for future in self._waiting.pop(facts.job_id, ()):
            if not future.done():
                future.set_result(attempt)

    def remove(self, attempt: Attempt) -> None:
        """Takes an attempt out; its output stays for a while, if there is any."""
        facts = attempt.facts
        self._active.pop(facts.attempt_id, None)
        if self._newest.get(facts.job_id) is attempt:
            del self._newest[facts.job_id]
        if attempt.ring is not None:
            self._recent[facts.attempt_id] = attempt
            while len(self._recent) > self._recent_limit:
                self._recent.popitem(last=False)

    def of_job(self, job_id: str, number: int = 0) -> Attempt | None:
        """A job's attempt by number, or its newest (0), as long as it is in memory."""
        newest = self._newest.get(job_id)
        if newest is not None and number in (0, newest.facts.fence):
            return newest
        found = [each for each in self._recent.values() if each.facts.job_id == job_id]
        if number:
            found = [each for each in found if each.facts.fence == number]
        return max(found, key=lambda each: each.facts.fence, default=None)

    def running(self, job_id: str) -> Attempt:
        """A job's attempt that is not over.

        Raises:
            FailedPrecondition: there is none.
        """
        attempt = self._newest.get(job_id)
        if attempt is None:
            raise FailedPrecondition(
                f"job {job_id} has nothing running here",
                reason="NotRunning",
                hint=f"see its state with: yard status {job_id}",
                fields={"job": job_id},
            )
        return attempt

    async def next_of(self, job_id: str, after: int) -> Attempt:
        """Waits for an attempt of a job with a higher number than `after`."""
        while True:
            known = self.of_job(job_id)
            if known is not None and known.facts.fence > after:
                return known
            future: asyncio.Future[Attempt] = asyncio.get_running_loop().create_future()
            waiting = self._waiting.setdefault(job_id, set())
            waiting.add(future)
            try:
                await future
            finally:
                waiting.discard(future)
                if not waiting and self._waiting.get(job_id) is waiting:
                    del self._waiting[job_id]
