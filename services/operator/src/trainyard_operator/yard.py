"""The calls to the yard. Submissions that come together travel together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc
from trainyard.channel import MAX_MESSAGE_BYTES
from trainyard.client.connection import Connection
from trainyard.client.statuses import code_of, from_code, from_rpc
from trainyard.errors import Conflict, NotFound, YardError
from trainyard_protos.v1 import common_pb2, launcher_pb2, metrics_pb2
from trainyard_protos.v1 import scheduler_pb2 as pb

_BATCH = 100
_BATCH_BYTES = MAX_MESSAGE_BYTES // 2
_APART_S = 0.25
"""Between the beginnings of two batches: a flood is few transactions of many jobs, and one job alone does not wait."""
_PAGE = 1000
_EVENTS = 500

Answer = TypeVar("Answer")
Waiting = tuple[pb.SubmitRequest, asyncio.Future[pb.SubmitResponse]]


class Yard:
    """What the operator asks of a yard. Every method raises YardError.

    Args:
        connection: to the yard's endpoint.
        timeout_s: deadline of one call.
    """

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._waiting: list[Waiting] = []
        self._sending: asyncio.Task[None] | None = None
        self._sent = float("-inf")

    async def submit(self, request: pb.SubmitRequest) -> pb.SubmitResponse:
        """The job of a request, made now or before; goes with whatever else is submitted in the meantime."""
        answer: asyncio.Future[pb.SubmitResponse] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await answer

    async def _send(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(self._sent + _APART_S - time.monotonic())
                self._sent = time.monotonic()
                await self._send_batch(self._next_batch())
        finally:
            self._sending = None

    def _next_batch(self) -> list[Waiting]:
        """Those that have waited longest: so many, and no more than one message takes."""
        count = size = 0
        for request, _ in self._waiting[:_BATCH]:
            size += request.ByteSize()
            if count and size > _BATCH_BYTES:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _send_batch(self, batch: list[Waiting]) -> None:
        request = pb.SubmitBatchRequest(requests=[request for request, _ in batch])
        try:
            results = (await self._call(self._connection.scheduler.SubmitBatch, request)).results
        except YardError as error:
            for _, answer in batch:
                answer.set_exception(error)
            return
        for (_, answer), result in zip(batch, results, strict=True):
            if result.code:
                answer.set_exception(_error(result))
            else:
                answer.set_result(result.submitted)

    async def job(self, job_id: str) -> pb.Job:
        """A job as it is."""
        return await self._call(self._connection.scheduler.GetJob, pb.GetJobRequest(id=job_id))

    async def cancel(self, job_id: str, message: str) -> pb.Job:
        """Asks for its end; raises Conflict when it has ended."""
        return await self._call(self._connection.scheduler.CancelJob, pb.CancelJobRequest(id=job_id, message=message))

    async def queued(self) -> AsyncIterator[pb.Job]:
        """All jobs that wait, with the reason why."""
        request = pb.ListJobsRequest(states=[pb.JOB_STATE_QUEUED], include_owned=True, page_size=_PAGE)
        while True:
            page = await self._call(self._connection.scheduler.ListJobs, request)
            for job in page.jobs:
                yield job
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def events(self, job_id: str, after_seq: int) -> AsyncIterator[pb.Event]:
        """All events of a job after a number, oldest first."""
        request = pb.ListEventsRequest(job=job_id, after_seq=after_seq, page_size=_EVENTS)
        while True:
            page = (await self._call(self._connection.scheduler.ListEvents, request)).events
            for event in page:
                yield event
            if len(page) < _EVENTS:
                return
            request.after_seq = page[-1].seq

    async def watch(self, after_seq: int | None, connected: Callable[[], None]) -> AsyncIterator[pb.Event]:
        """Events of all jobs, those after a number or (None) from now on.

        Args:
            connected: called once nothing can be missed any more.
        """
        request = pb.WatchRequest(after_seq=after_seq or 0, from_now=after_seq is None)
        call = self._connection.scheduler.Watch(request)
        try:
            await call.initial_metadata()
            connected()
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()

    async def progress(self, job_id: str) -> common_pb2.Progress:
        """How far a running job is; an empty message when nobody knows."""
        try:
            request = launcher_pb2.DescribeRequest(job_id=job_id)
            return (await self._call(self._connection.launcher.Describe, request)).progress
        except (NotFound, Conflict):  # it has ended, or begins only now
            return common_pb2.Progress()

    async def series(self, job_id: str, name: str) -> metrics_pb2.SeriesInfo | None:
        """The summary of a series over all attempts; None before its first point."""
        selector = metrics_pb2.SeriesSelector(job_id=job_id, names=[name])
        try:
            request = metrics_pb2.ListSeriesRequest(selector=selector)
            found = (await self._call(self._connection.metrics.ListSeries, request)).series
        except NotFound:
            return None
        return next((each for each in found if each.name == name and each.count), None)

    async def _call(self, method: Callable[..., Awaitable[Answer]], request: object) -> Answer:
        return await self._connection.call(method, request, self._timeout_s)

    async def close(self) -> None:
        """Ends every call."""
        if self._sending is not None:
            self._sending.cancel()
        await self._connection.close()


def _error(result: pb.SubmitBatchResponse.Result) -> YardError:
    problems = tuple(result.problems.problems)
    kind = from_code(code_of(result.code), has_problems=bool(problems))
    return kind(result.message, reason=result.reason, hint=result.hint, problems=problems)
