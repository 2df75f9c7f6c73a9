"""How long a yard of one machine lives: who is attached, which jobs are active, and when it should end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from servicekit.auth import require_user
from servicekit.errors import FailedPrecondition, ServiceError, Unavailable
from servicekit.events import caller
from trainyard_protos.v1 import scheduler_pb2, scheduler_pb2_grpc, yard_pb2
from trainyard_scheduler.yard_servicer import Cancel, YardFacts, YardServicer

logger = logging.getLogger(__name__)

ACTIVE = (
    scheduler_pb2.JOB_STATE_QUEUED,
    scheduler_pb2.JOB_STATE_STARTING,
    scheduler_pb2.JOB_STATE_RUNNING,
    scheduler_pb2.JOB_STATE_STOPPING,
    scheduler_pb2.JOB_STATE_FINALIZING,
)
_FIRST_CLIENT_S = 30.0
_STOP_JOBS_S = 60.0
_LINGER_S = 0.2  # a client that ends one command and starts the next finds the yard still up

RecordShutdown = Callable[[str, str], Awaitable[None]]
Context = grpc.aio.ServicerContext[Any, Any]


class AttachedYardServicer(YardServicer):
    """Knows who is attached, and says when a yard that was started for them should end.

    Args:
        facts: of this yard.
        cancel: cancels a job.
    """

    def __init__(self, facts: YardFacts, cancel: Cancel) -> None:
        super().__init__(facts, cancel)
        self._attached = 0
        self._closing = False
        self._changed = asyncio.Event()
        self.ended = asyncio.Event()

    async def Attach(
        self, request_iterator: AsyncIterator[yard_pb2.AttachRequest], context: Context
    ) -> AsyncGenerator[yard_pb2.AttachResponse, None]:
        require_user()
        if self._closing:
            raise Unavailable("this yard is going down", reason="YardEnding", hint="start another one: yard up")
        self._attached += 1
        self._changed.set()
        try:
            async with contextlib.aclosing(super().Attach(request_iterator, context)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._attached -= 1

    async def _on_detached(self, wish: yard_pb2.AttachRequest) -> None:
        await super()._on_detached(wish)
        # Seen after this task is discarded from the farewells.
        asyncio.get_running_loop().call_later(0, self._changed.set)

    async def Shutdown(self, request: yard_pb2.ShutdownRequest, context: Context) -> yard_pb2.ShutdownResponse:
        require_user()
        asyncio.get_running_loop().call_soon(self.ended.set)
        return yard_pb2.ShutdownResponse()

    async def until_unused(self) -> None:
        """Returns when no client is attached and nothing is left to do."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_CLIENT_S):
                await self._changed.wait()
        await self._until_idle()

    async def _until_idle(self) -> None:
        while True:
            self._changed.clear()
            if await self._unused():
                self._closing = True
                return
            await self._changed.wait()

    async def _unused(self) -> bool:
        if self._attached or self._farewells or await self._busy():
            return False
        await asyncio.sleep(_LINGER_S)
        idle = not await self._busy()
        return idle and not self._attached

    async def _busy(self) -> bool:
        """Whether it has something to do for itself."""
        return False


class ReadingYardServicer(AttachedYardServicer):
    """The same of a yard that only reads: it has no jobs, and gives way to a yard that runs them."""

    def __init__(self, facts: YardFacts) -> None:
        super().__init__(facts, _cancels_nothing)
        self._giving_way: asyncio.TimerHandle | None = None

    def give_way(self, grace_s: float) -> None:
        """Takes no new clients; ends with those it has, or after a grace time in seconds."""
        if not self._closing:
            self._closing = True
            self._giving_way = asyncio.get_running_loop().call_later(grace_s, self.ended.set)

    def stay(self) -> None:
        """Takes clients again, unless it ends for another reason."""
        if self._giving_way is not None and not self.ended.is_set():
            self._giving_way.cancel()
            self._giving_way, self._closing = None, False


async def _cancels_nothing(workspace: str, job_id: str, message: str) -> None:
    raise FailedPrecondition(f"job {job_id} is not cancelled: this yard only reads", reason="ReadOnlyYard")


class OwnYardServicer(AttachedYardServicer):
    """The same of a yard with jobs, which keep it up while they are active.

    Args:
        facts: of this yard.
        cancel: cancels a job.
        record_shutdown: stores the event of a shutdown: actor, message.
        channel: to the yard itself.
    """

    def __init__(
        self, facts: YardFacts, cancel: Cancel, record_shutdown: RecordShutdown, channel: grpc.aio.Channel
    ) -> None:
        super().__init__(facts, cancel)
        self._record_shutdown = record_shutdown
        self._scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)

    async def Shutdown(self, request: yard_pb2.ShutdownRequest, context: Context) -> yard_pb2.ShutdownResponse:
        require_user()
        jobs = "jobs are cancelled first" if request.stop_jobs else "jobs keep running"
        try:
            await self._record_shutdown(caller(context), jobs)
        except ServiceError as error:  # a full disk must not keep a yard from ending
            logger.error("the shutdown is in no event", extra={"actor": caller(context), "reason": error.reason})
        stopped = 0
        if request.stop_jobs:
            stopped = await self.stop_jobs("the yard is going down", request.timeout_s or _STOP_JOBS_S)
        asyncio.get_running_loop().call_soon(self.ended.set)
        return yard_pb2.ShutdownResponse(stopped_jobs=stopped)

    async def stop_jobs(self, message: str, timeout_s: float = _STOP_JOBS_S) -> int:
        """Cancels everything that is active and waits until it is over, at most `timeout_s`; returns how many."""
        watch = self._scheduler.Watch(scheduler_pb2.WatchRequest(from_now=True))
        await watch.initial_metadata()
        count = 0
        try:
            async with asyncio.timeout(timeout_s):
                jobs = await self._active()
                count = len(jobs)
                await asyncio.gather(*(self.cancel(job.workspace, job.id, message) for job in jobs))
                while await self._active(1):
                    await watch.read()
        except TimeoutError:
            logger.error("jobs did not stop in time", extra={"timeout_s": timeout_s})
        finally:
            watch.cancel()
        return count

    async def _active(self, limit: int = 1000) -> list[scheduler_pb2.Job]:
        request = scheduler_pb2.ListJobsRequest(states=ACTIVE, include_owned=True, page_size=limit)
        return list((await self._scheduler.ListJobs(request)).jobs)

    async def _until_idle(self) -> None:
        watch = self._scheduler.Watch(scheduler_pb2.WatchRequest(from_now=True))
        await watch.initial_metadata()
        watching = asyncio.create_task(self._wake_on_events(watch))
        try:
            await super()._until_idle()
        finally:
            watching.cancel()
            watch.cancel()

    async def _busy(self) -> bool:
        return bool(await self._active(1))

    async def _wake_on_events(self, watch: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
        async for _ in watch:
            self._changed.set()
