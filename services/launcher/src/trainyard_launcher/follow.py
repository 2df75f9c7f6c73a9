"""What a follower of a job gets: lines, progress, beginnings and ends, attempt after attempt until the job's end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import grpc
from trainyard_protos.v1 import common_pb2, launcher_pb2, scheduler_pb2, scheduler_pb2_grpc

from trainyard_launcher.attempts import Attempt
from trainyard_launcher.registry import Registry
from trainyard_launcher.ring import Cursor, Gap
from trainyard_launcher.scheduler import backoff, is_away

Event = launcher_pb2.FollowEvent
_BATCH_LINES = 500
_ENDED_STATES = frozenset(
    {scheduler_pb2.JOB_STATE_SUCCEEDED, scheduler_pb2.JOB_STATE_FAILED, scheduler_pb2.JOB_STATE_CANCELLED}
)


async def follow_attempt(attempt: Attempt, next_seq: Mapping[int, int]) -> AsyncIterator[Event]:
    """One attempt from its oldest kept line (or `next_seq`) to its end."""
    facts = attempt.facts
    cursor = Cursor(next_seq=dict(next_seq))
    progress: common_pb2.Progress | None = None
    news = attempt.watch()
    try:
        yield Event(started=Event.AttemptStarted(attempt_id=facts.attempt_id, number=facts.fence))
        while True:
            news.clear()
            over = attempt.over
            for event in _lines(attempt, cursor):
                yield event
            if attempt.progress is not None and attempt.progress is not progress:
                progress = attempt.progress
                yield Event(progress=progress)
            if attempt.ring is not None and attempt.ring.behind(cursor):
                continue
            if over:
                break
            await news.wait()
        for gap in attempt.ring.rest(cursor) if attempt.ring is not None else ():
            yield _dropped(gap)
        ended = Event.AttemptEnded(attempt_id=facts.attempt_id, number=facts.fence, exit=attempt.verdict())
        yield Event(ended=ended)
    finally:
        attempt.unwatch(news)


def _lines(attempt: Attempt, cursor: Cursor) -> list[Event]:
    """The next batch of lines, split where some are missing."""
    if attempt.ring is None:
        return []
    events: list[Event] = []
    batch: list[common_pb2.LogLine] = []
    for item in attempt.ring.read(cursor, _BATCH_LINES):
        if not isinstance(item, Gap):
            batch.append(item)
            continue
        if batch:
            events.append(Event(lines=Event.Lines(lines=batch)))
            batch = []
        events.append(_dropped(item))
    if batch:
        events.append(Event(lines=Event.Lines(lines=batch)))
    return events


def _dropped(gap: Gap) -> Event:
    return Event(dropped=Event.Dropped(node=gap.node, from_seq=gap.from_seq, to_seq=gap.to_seq))


class JobFollower:
    """Follows jobs over their attempts.

    Args:
        attempts: of this launcher.
        scheduler: says when a job has ended.
        call_timeout_s: deadline of one call to it.
    """

    def __init__(
        self, attempts: Registry, scheduler: scheduler_pb2_grpc.SchedulerServiceAsyncStub, call_timeout_s: float
    ) -> None:
        self._attempts = attempts
        self._scheduler = scheduler
        self._call_timeout_s = call_timeout_s

    async def follow(self, workspace: str, job_id: str, next_seq: Mapping[int, int]) -> AsyncIterator[Event]:
        """The current attempt and those that come after it, until the job has ended."""
        done = 0
        while (attempt := await self._next(workspace, job_id, done)) is not None:
            async for event in follow_attempt(attempt, {} if done else next_seq):
                yield event
            done = attempt.facts.fence

    async def _next(self, workspace: str, job_id: str, after: int) -> Attempt | None:
        """The next attempt of a job; None when it has ended and there will be none."""
        known = self._attempts.of_job(job_id)
        if known is not None and known.facts.workspace != workspace:
            return None
        if known is not None and known.facts.fence > after:
            return known
        started = asyncio.ensure_future(self._attempts.next_of(job_id, after))
        ended = asyncio.ensure_future(self._end_of(workspace, job_id))
        try:
            await asyncio.wait({started, ended}, return_when=asyncio.FIRST_COMPLETED)
            if started.done():
                attempt = started.result()
                return attempt if attempt.facts.workspace == workspace else None
            ended.result()
            return None
        finally:
            for task in (started, ended):
                task.cancel()
            await asyncio.gather(started, ended, return_exceptions=True)

    async def _end_of(self, workspace: str, job_id: str) -> None:
        """Returns when a job has ended."""
        for pause_s in backoff():
            with contextlib.suppress(grpc.aio.AioRpcError):
                if await self._has_ended(workspace, job_id):
                    return
            await asyncio.sleep(pause_s)

    async def _has_ended(self, workspace: str, job_id: str) -> bool:
        """Watches a job; false when the watch broke off before its end."""
        request = scheduler_pb2.GetJobRequest(workspace=workspace, id=job_id)
        try:
            job = await self._scheduler.GetJob(request, timeout=self._call_timeout_s)
        except grpc.aio.AioRpcError as error:
            if is_away(error):
                raise
            return True  # a job the scheduler does not know has no more attempts
        if job.state in _ENDED_STATES:
            return True
        watch = self._scheduler.Watch(
            scheduler_pb2.WatchRequest(workspace=workspace, job=job_id, after_seq=job.event_seq)
        )
        try:
            async for event in watch:
                if event.state in _ENDED_STATES:
                    return True
            return False
        finally:
            watch.cancel()
