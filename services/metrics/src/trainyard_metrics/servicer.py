"""The methods of `MetricsService`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
from servicekit.auth import require_user, require_workspace
from servicekit.errors import InvalidArgument
from servicekit.store import Store
from trainyard_protos.v1 import metrics_pb2 as pb
from trainyard_protos.v1.metrics_pb2_grpc import MetricsServiceServicer

from trainyard_metrics import lines, runs
from trainyard_metrics.access import check_run_id, own_run, require_reader, require_writer
from trainyard_metrics.appending import AppendStream
from trainyard_metrics.bells import Bells
from trainyard_metrics.domain.lines import LineFilter
from trainyard_metrics.domain.stitch import Attempt
from trainyard_metrics.points import PointCache
from trainyard_metrics.runlogs import RunLogs
from trainyard_metrics.series import SeriesReader
from trainyard_metrics.settings import Settings

Context = grpc.aio.ServicerContext[Any, Any]


class MetricsServicer(MetricsServiceServicer):
    """Checks who calls, then hands over to runs, logs and series."""

    def __init__(self, store: Store, logs: RunLogs, bells: Bells, settings: Settings) -> None:
        self._store = store
        self._logs = logs
        self._bells = bells
        self._settings = settings
        self._points = PointCache(logs, settings.max_cached_points)
        self._series = SeriesReader(self._points, settings)

    async def OpenRun(self, request: pb.OpenRunRequest, context: Context) -> pb.Run:
        check_run_id(request.run.id)
        run = own_run(request.run)
        runs.check(run, self._settings)
        opened = await self._store.write(lambda session: runs.message(runs.open_run(session, run)))
        self._bells.ring(opened.job_id)
        return opened

    async def Append(
        self, request_iterator: AsyncIterator[pb.AppendRequest], context: Context
    ) -> AsyncIterator[pb.AppendResponse]:
        stream = AppendStream(self._logs, self._settings, self._admit_writer)
        async for response in stream.serve(request_iterator):
            yield response

    async def GetPosition(self, request: pb.GetPositionRequest, context: Context) -> pb.GetPositionResponse:
        await self._admit_writer(request.run_id)
        async with self._logs.use(request.run_id) as log:
            return pb.GetPositionResponse(next_seq=log.position(request.writer_id))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        workspace = require_reader(request.workspace, request.job_id)
        return await self._store.read(lambda session: runs.page(session, workspace, request))

    async def ListSeries(self, request: pb.ListSeriesRequest, context: Context) -> pb.ListSeriesResponse:
        attempts = await self._select(request.selector)
        return pb.ListSeriesResponse(series=await self._series.infos(attempts, request.selector))

    async def QuerySeries(self, request: pb.QuerySeriesRequest, context: Context) -> pb.QuerySeriesResponse:
        return await self._series.query(await self._select(request.selector), request)

    async def WatchSeries(
        self, request: pb.WatchSeriesRequest, context: Context
    ) -> AsyncIterator[pb.WatchSeriesResponse]:
        sent: dict[tuple[str, int], bytes] = {}  # encoded, because a NaN does not equal itself
        with self._bells.listen() as listener:
            listener.add([request.selector.job_id or request.selector.run_id])
            while True:
                attempts = await self._select(request.selector)
                listener.add(attempt.run_id for attempt in attempts)
                infos = await self._series.infos(attempts, request.selector)
                fresh = [info for info in infos if sent.get((info.name, info.rank)) != info.SerializeToString()]
                sent.update({(info.name, info.rank): info.SerializeToString() for info in fresh})
                if fresh:
                    yield pb.WatchSeriesResponse(series=fresh)
                await listener.wait()
                # Many appends make one answer.
                await asyncio.sleep(self._settings.watch_interval_s)

    async def ReadLogs(self, request: pb.ReadLogsRequest, context: Context) -> AsyncIterator[pb.ReadLogsResponse]:
        workspace = require_reader(request.workspace, request.job_id)
        if not 0 <= request.tail <= self._settings.max_tail_lines:
            raise InvalidArgument(
                f"a tail of {request.tail} lines", reason="BadTail", hint=f"at most {self._settings.max_tail_lines:,}"
            )
        wanted = LineFilter(frozenset(request.ranks), request.from_time_ns, request.search)
        rows = await self._store.read(lambda session: runs.of_job(session, workspace, request.job_id))
        chosen = [row for row in rows if request.attempt in (0, row.fence)]
        async with AsyncExitStack() as stack:
            opened = [(row.fence, await stack.enter_async_context(self._logs.use(row.id))) for row in chosen]
            sources = [(fence, log.snapshot()) for fence, log in opened]
            found = (
                iter(await asyncio.to_thread(lines.tail, sources, wanted, request.tail))
                if request.tail
                else lines.every(sources, wanted)
            )
            pages = lines.pages(found)
            while (page := await asyncio.to_thread(_next, pages)) is not None:
                yield page

    async def DeleteJobRuns(self, request: pb.DeleteJobRunsRequest, context: Context) -> pb.DeleteJobRunsResponse:
        require_user()
        workspace = require_workspace(request.workspace)
        if not request.job_id:
            raise InvalidArgument("no job id", reason="BadJobId", hint="name the job whose runs are to be removed")
        rows = await self._store.read(lambda session: runs.of_job(session, workspace, request.job_id))
        for row in rows:
            self._points.forget(row.id)
            await self._logs.discard(row.id)
        await self._store.write(lambda session: runs.remove(session, [row.id for row in rows]))
        return pb.DeleteJobRunsResponse(runs=len(rows))

    async def _admit_writer(self, run_id: str) -> None:
        require_writer(check_run_id(run_id))
        row = await self._store.read(lambda session: runs.find(session, run_id))
        require_workspace(row.workspace)

    async def _select(self, selector: pb.SeriesSelector) -> list[Attempt]:
        if selector.WhichOneof("of") == "run_id":
            row = await self._store.read(lambda session: runs.find(session, check_run_id(selector.run_id)))
            require_reader(row.workspace, row.job_id)
            return [runs.attempt(row)]
        if not selector.job_id:
            raise InvalidArgument("neither a job nor a run", reason="BadSelector", hint="set job_id or run_id")
        workspace = require_reader(selector.workspace, selector.job_id)
        rows = await self._store.read(lambda session: runs.of_job(session, workspace, selector.job_id))
        return [runs.attempt(row) for row in rows]


def _next(pages: Iterator[pb.ReadLogsResponse]) -> pb.ReadLogsResponse | None:
    return next(pages, None)
