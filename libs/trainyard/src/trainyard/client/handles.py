"""A submitted job, for asyncio code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from trainyard_protos.v1 import launcher_pb2, metrics_pb2, scheduler_pb2

from trainyard import errors
from trainyard.client import states
from trainyard.client.follow import FollowCalls
from trainyard.client.frames import AsyncLines, SeriesByName
from trainyard.client.names import SYSTEM_PREFIX
from trainyard.client.runs import Subject


@dataclass(frozen=True, slots=True)
class AsyncJobHandle:
    """One job of a yard."""

    calls: FollowCalls
    id: str
    name: str

    async def status(self) -> scheduler_pb2.Job:
        """The job now, with its attempts."""
        return await self.calls.get(self.id)

    async def wait(self, timeout_s: float | None = None, *, check: bool = True) -> scheduler_pb2.Job:
        """Waits for the job's end.

        Args:
            timeout_s: seconds to wait at most; None for no limit.
            check: raise unless the job succeeded.

        Raises:
            JobFailed, JobCancelled: with `check`.
            NeverFits: no machine can hold it; it stays queued.
            TimeoutError: the job has not ended in time; it goes on.
        """
        job = await asyncio.wait_for(self.calls.wait(self.id), timeout_s)
        if check:
            check_succeeded(job)
        return job

    @property
    def _runs(self) -> Subject:
        return Subject(job_id=self.id)

    def logs(
        self, *, attempt: int = 0, ranks: Sequence[int] = (), tail: int = 0, search: str = "", regex: str = ""
    ) -> AsyncLines:
        """Stored lines of output; see `AsyncClient.logs`."""
        return self.calls.logs(self._runs, attempt=attempt, ranks=ranks, tail=tail, search=search, regex=regex)

    def follow(self) -> AsyncIterator[launcher_pb2.FollowEvent]:
        """Output and progress as they come, until the job has ended."""
        return self.calls.follow(self.id)

    def events(self) -> AsyncIterator[scheduler_pb2.Event]:
        """Every state change so far, oldest first."""
        return self.calls.events(self.id)

    async def metrics(self, *names: str, max_points: int = 1000) -> SeriesByName:
        """Points of series by name; of several ranks that log one name, the lowest rank's."""
        series = await self.calls.metrics(self._runs, names, max_points=max_points)
        return SeriesByName({each.name: each for each in sorted(series, key=lambda each: -each.rank)})

    async def values(self) -> Mapping[str, float]:
        """The last value of every series the script tracked."""
        series = await self.calls.series(self._runs)
        return tracked_values(series)

    async def explain(self) -> scheduler_pb2.Explanation:
        """Why the job is in its state."""
        return await self.calls.explain(self.id)

    async def cancel(self, message: str = "") -> scheduler_pb2.Job:
        """Asks for the job's end."""
        return await self.calls.cancel(self.id, message)

    async def retry(self) -> scheduler_pb2.Job:
        """Puts the job, failed or cancelled, back to the queue."""
        return await self.calls.retry(self.id)


def check_succeeded(job: scheduler_pb2.Job) -> None:
    """Raises unless an ended job succeeded.

    Raises:
        JobFailed: it failed.
        JobCancelled: it was cancelled.
    """
    if job.state == scheduler_pb2.JOB_STATE_CANCELLED:
        why = f": {job.message}" if job.message else ""
        raise errors.JobCancelled(f"{job.name} was cancelled{why}", reason=job.reason, hint=f"yard retry {job.id}")
    if job.state != scheduler_pb2.JOB_STATE_SUCCEEDED:
        raise errors.JobFailed(
            f"{job.name} {states.name(job.state)}: {job.message or job.reason}",
            reason=job.reason,
            hint=f"yard logs {job.id}",
        )


def tracked_values(series: Sequence[metrics_pb2.SeriesInfo]) -> dict[str, float]:
    """Last values by name, without what the agent samples; of several ranks, the lowest one's."""
    own = [each for each in series if not each.name.startswith(SYSTEM_PREFIX)]
    return {each.name: each.last_value for each in sorted(own, key=lambda each: (each.name, -each.rank))}
