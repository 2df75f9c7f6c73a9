"""The methods of `MetricsService`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import grpc
from servicekit.auth import current_principal, require_user, require_workspace
from servicekit.errors import InvalidArgument
from servicekit.events import EventLog, Recorder, caller
from servicekit.slots import Slots
from servicekit.store import Store
from trainyard_protos.v1 import metrics_pb2 as pb
from trainyard_protos.v1.metrics_pb2_grpc import MetricsServiceServicer

from trainyard_metrics import lines, runs
from trainyard_metrics.access import check_run_id, own_run, require_reader, require_writer
from trainyard_metrics.appending import AppendStream
from trainyard_metrics.bells import Bells
from trainyard_metrics.closing import Admission, Closings
from trainyard_metrics.log_reading import LogReading
from trainyard_metrics.reading import Reader
from trainyard_metrics.removal import Removal
from trainyard_metrics.runlogs import RunLogs
from trainyard_metrics.search import search
from trainyard_metrics.selecting import select_runs
from trainyard_metrics.series import Seen, SeriesReader
from trainyard_metrics.settings import Settings
from trainyard_metrics.summaries import Summaries
from trainyard_metrics.tables import RunRow
from trainyard_metrics.upkeep import Upkeep

_MAX_RUNS = 1000

Context = grpc.aio.ServicerContext[Any, Any]


class MetricsServicer(MetricsServiceServicer):
    """Checks who calls, then hands over to runs, logs and series."""

    def __init__(
        self,
        store: Store,
        logs: RunLogs,
        reader: Reader,
        summaries: Summaries,
        removal: Removal,
        bells: Bells,
        log_slots: Slots,
        settings: Settings,
        events: EventLog,
        upkeep: Upkeep,
    ) -> None:
        self._store = store
        self._events = events
        self._upkeep = upkeep
        self._logs = logs
        self._reader = reader
        self._summaries = summaries
        self._removal = removal
        self._bells = bells
        self._settings = settings
        self._closings = Closings(store)
        self._series = SeriesReader(reader, summaries, settings)
        self._log_slots = log_slots

    async def OpenRun(self, request: pb.OpenRunRequest, context: Context) -> pb.Run:
        check_run_id(request.run.id)
        run = own_run(request.run)
        runs.check(run, self._settings)
        principal = current_principal()
        opened = await self._store.write(lambda session: runs.open_run(session, run, self._settings, principal))
        await self._summaries.opened(opened.facts, stitch=opened.stitch)
        self._bells.ring(opened.run.job_id)
        return opened.run

    async def Append(
        self, request_iterator: AsyncIterator[pb.AppendRequest], context: Context
    ) -> AsyncIterator[pb.AppendResponse]:
        async with AsyncExitStack() as writing:
            stream = AppendStream(self._logs, self._settings, partial(self._begin_writing, writing))
            async for response in stream.serve(request_iterator):
                yield response

    async def GetPosition(self, request: pb.GetPositionRequest, context: Context) -> pb.GetPositionResponse:
        await self._admit_writer(request.run_id)
        async with self._logs.use(request.run_id) as log:
            return pb.GetPositionResponse(next_seq=log.position(request.writer_id))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        workspace = require_reader(request.workspace, request.job_id)
        return await self._store.read(lambda session: runs.page(session, workspace, request))

    async def SearchRuns(self, request: pb.SearchRunsRequest, context: Context) -> pb.SearchRunsResponse:
        workspace = require_reader(request.workspace, "")
        await self._summaries.settle()
        return await self._store.read(lambda session: search(session, workspace, request))

    async def ListSeries(self, request: pb.ListSeriesRequest, context: Context) -> pb.ListSeriesResponse:
        selection = await select_runs(self._store, request.selector)
        return pb.ListSeriesResponse(series=await self._series.infos(selection))

    async def QuerySeries(self, request: pb.QuerySeriesRequest, context: Context) -> pb.QuerySeriesResponse:
        return await self._series.query(await select_runs(self._store, request.selector), request)

    async def WatchSeries(
        self, request: pb.WatchSeriesRequest, context: Context
    ) -> AsyncIterator[pb.WatchSeriesResponse]:
        seen = Seen()
        with self._bells.listen() as listener:
            listener.add([request.selector.job_id or request.selector.run_id])
            while True:
                selection = await select_runs(self._store, request.selector)
                listener.add(attempt.run_id for attempt in selection.attempts)
                if fresh := await self._series.changes(selection, seen):
                    yield pb.WatchSeriesResponse(series=fresh)
                await listener.wait()
                # Many appends make one answer.
                await asyncio.sleep(self._settings.watch_interval_s)

    async def ReadLogs(self, request: pb.ReadLogsRequest, context: Context) -> AsyncIterator[pb.ReadLogsResponse]:
        if not 0 <= request.tail <= self._settings.max_tail_lines:
            raise InvalidArgument(
                f"a tail of {request.tail} lines", reason="BadTail", hint=f"at most {self._settings.max_tail_lines:,}"
            )
        wanted = lines.line_filter(request)
        rows = await self._rows_of_logs(request)
        chosen = [row for row in rows if request.attempt in (0, row.fence)]
        after = lines.position_of(request.after) if request.HasField("after") else None
        reading = LogReading(self._reader, self._log_slots, chosen, wanted, request.tail, after)
        async for page in reading.pages():
            yield page

    async def CloseAttempt(self, request: pb.CloseAttemptRequest, context: Context) -> pb.CloseAttemptResponse:
        require_user()
        request.workspace = require_workspace(request.workspace)
        await self._closings.close(request)
        return pb.CloseAttemptResponse()

    async def DeleteJobRuns(self, request: pb.DeleteJobRunsRequest, context: Context) -> pb.DeleteJobRunsResponse:
        require_user()
        workspace = require_workspace(request.workspace)
        if not request.job_id:
            raise InvalidArgument("no job id", reason="BadJobId", hint="name the job whose runs are to be removed")
        rows = await self._store.read(lambda session: runs.of_job(session, workspace, request.job_id))
        taken = await self._bytes([row.id for row in rows])
        if request.dry_run:
            return pb.DeleteJobRunsResponse(runs=len(rows), bytes=taken)
        actor = f"launcher/{request.launcher_id}" if request.launcher_id else caller(context)
        count = await self._removal.remove_job(workspace, request.job_id, Recorder(self._events, actor))
        return pb.DeleteJobRunsResponse(runs=count, bytes=taken)

    async def DeleteRuns(self, request: pb.DeleteRunsRequest, context: Context) -> pb.DeleteRunsResponse:
        require_user()
        workspace = require_workspace(request.workspace)
        run_ids = list(dict.fromkeys(map(check_run_id, request.run_ids)))
        if not 0 < len(run_ids) <= _MAX_RUNS:
            raise InvalidArgument(
                f"{len(run_ids):,} runs", reason="BadRunIds", hint=f"name at least one run and at most {_MAX_RUNS:,}"
            )
        taken = await self._bytes(run_ids)
        recorder = Recorder(self._events, caller(context))
        await self._removal.remove_as_asked(workspace, run_ids, recorder, dry_run=request.dry_run)
        return pb.DeleteRunsResponse(bytes=taken)

    async def _bytes(self, run_ids: Sequence[str]) -> pb.RunBytes:
        return pb.RunBytes(**asdict(await self._upkeep.bytes_of(run_ids)))

    async def ListJobsWithRuns(
        self, request: pb.ListJobsWithRunsRequest, context: Context
    ) -> pb.ListJobsWithRunsResponse:
        require_user()
        return await self._store.read(lambda session: runs.jobs(session, request))

    async def _admit_writer(self, run_id: str) -> Admission:
        require_writer(check_run_id(run_id))
        row = await self._store.read(lambda session: runs.find(session, run_id))
        require_workspace(row.workspace)
        return await self._closings.admit(current_principal(), row)

    async def _begin_writing(self, writing: AsyncExitStack, run_id: str) -> Admission:
        admission = await self._admit_writer(run_id)
        await writing.enter_async_context(self._summaries.writing(run_id))
        return admission

    async def _rows_of_logs(self, request: pb.ReadLogsRequest) -> Sequence[RunRow]:
        if bool(request.job_id) == bool(request.run_id):
            raise InvalidArgument("logs of neither or both", reason="BadSelector", hint="set either job_id or run_id")
        if request.run_id:
            run_id = check_run_id(request.run_id)
            row = await self._store.read(lambda session: runs.find(session, run_id))
            require_reader(row.workspace, row.job_id)
            return [row]
        workspace = require_reader(request.workspace, request.job_id)
        return await self._store.read(lambda session: runs.of_job(session, workspace, request.job_id))
