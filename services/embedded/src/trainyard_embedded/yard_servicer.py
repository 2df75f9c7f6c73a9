"""YardService: what is behind this endpoint, and how long it lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import grpc
from servicekit.auth import require_user
from servicekit.errors import Unavailable
from trainyard_protos.v1 import scheduler_pb2, scheduler_pb2_grpc, yard_pb2, yard_pb2_grpc

if TYPE_CHECKING:
    from trainyard_embedded.settings import YardSettings

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

Context = grpc.aio.ServicerContext[Any, Any]


class YardServicer(yard_pb2_grpc.YardServiceServicer):
    """Knows who is attached and which jobs are active, and says when the yard should end.

    Args:
        settings: of this yard.
        channel: to the yard itself.
    """

    def __init__(self, settings: YardSettings, channel: grpc.aio.Channel) -> None:
        self._settings = settings
        self._scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self._attached = 0
        self._closing = False
        self._farewells: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.ended = asyncio.Event()

    async def Info(self, request: yard_pb2.InfoRequest, context: Context) -> yard_pb2.InfoResponse:
        settings = self._settings
        return yard_pb2.InfoResponse(
            version=version("trainyard-embedded"),
            pid=os.getpid(),
            home=str(settings.home),
            ephemeral=settings.ephemeral,
            metrics_url=f"http://{settings.host}:{settings.metrics_port}/metrics" if settings.metrics_port else "",
            services=["scheduler", "launcher", "metrics", "artifacts"],
        )

    async def Attach(
        self, request_iterator: AsyncIterator[yard_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[yard_pb2.AttachResponse]:
        require_user()
        if self._closing:
            raise Unavailable("this yard is going down", reason="YardEnding", hint="start another one: yard up")
        self._attached += 1
        self._changed.set()
        wish = yard_pb2.AttachRequest()
        try:
            async for request in request_iterator:
                wish = request
                yield yard_pb2.AttachResponse()
        finally:
            self._attached -= 1
            # The stream's own task is being cancelled when its client vanished; what follows must not be.
            farewell = asyncio.create_task(self._on_detached(wish))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)

    async def _on_detached(self, wish: yard_pb2.AttachRequest) -> None:
        if wish.on_loss == yard_pb2.AttachRequest.ON_LOSS_CANCEL and wish.job_id:
            await self._cancel(wish.workspace, wish.job_id, "the client that ran this job went away")
        # Seen after this task is discarded from the farewells.
        asyncio.get_running_loop().call_later(0, self._changed.set)

    async def Shutdown(self, request: yard_pb2.ShutdownRequest, context: Context) -> yard_pb2.ShutdownResponse:
        require_user()
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
                await asyncio.gather(*(self._cancel(job.workspace, job.id, message) for job in jobs))
                while await self._active(1):
                    await watch.read()
        except TimeoutError:
            logger.error("jobs did not stop in time", extra={"timeout_s": timeout_s})
        finally:
            watch.cancel()
        return count

    async def _cancel(self, workspace: str, job_id: str, message: str) -> None:
        try:
            await self._scheduler.CancelJob(
                scheduler_pb2.CancelJobRequest(workspace=workspace, id=job_id, message=message)
            )
        except grpc.aio.AioRpcError as error:
            logger.info("cancel refused", extra={"job": job_id, "reason": error.details()})

    async def _active(self, limit: int = 1000) -> list[scheduler_pb2.Job]:
        request = scheduler_pb2.ListJobsRequest(states=ACTIVE, include_owned=True, page_size=limit)
        return list((await self._scheduler.ListJobs(request)).jobs)

    async def until_unused(self) -> None:
        """Returns when an ephemeral yard has no client and no active job."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _FIRST_CLIENT_S)
        watch = self._scheduler.Watch(scheduler_pb2.WatchRequest(from_now=True))
        await watch.initial_metadata()
        watching = asyncio.create_task(self._wake_on_events(watch))
        try:
            while True:
                self._changed.clear()
                if await self._unused():
                    self._closing = True
                    return
                await self._changed.wait()
        finally:
            watching.cancel()
            watch.cancel()

    async def _unused(self) -> bool:
        if self._attached or self._farewells or await self._active(1):
            return False
        await asyncio.sleep(_LINGER_S)
        idle = not await self._active(1)
        return idle and not self._attached

    async def _wake_on_events(self, watch: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
        async for _ in watch:
            self._changed.set()
