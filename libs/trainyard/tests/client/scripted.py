"""A yard that answers from a script, over real gRPC: for what a client must do whatever the yard's inside is."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from trainyard import home
from trainyard_protos.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    artifacts_pb2,
    artifacts_pb2_grpc,
    common_pb2,
    launcher_pb2,
    launcher_pb2_grpc,
    metrics_pb2,
    metrics_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    yard_pb2,
    yard_pb2_grpc,
)

from scripts.testbed.ports import free_port

TOKEN = "a-token"
JOB_ID = "01939a7e-0000-7000-8000-000000000001"
_RESOLVED = "kind: TrainingJob\nspec: {nodes: 1}\n"

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class Refusal:
    """A status with the details that every error of a yard has."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    hint: str = ""
    problems: list[common_pb2.Problem] = field(default_factory=list)

    async def give(self, context: Context) -> None:
        info = common_pb2.ErrorInfo(reason=self.reason, hint=self.hint, fields={"id": "x"})
        trailing = [("trainyard-error-bin", info.SerializeToString())]
        if self.problems:
            problems = common_pb2.Problems(problems=self.problems)
            trailing.append(("trainyard-problems-bin", problems.SerializeToString()))
        await context.abort(self.code, self.message, tuple(trailing))


def job(state: str = "running", **changes: Any) -> scheduler_pb2.Job:
    """A job in a state."""
    fields: dict[str, Any] = {
        "id": JOB_ID,
        "workspace": "default",
        "name": "digits",
        "queue": "default",
        "priority": 50,
        "state": scheduler_pb2.JobState.Value(f"JOB_STATE_{state.upper()}"),
        "attempt": 1,
        "nodes": 1,
        "workers_per_node": 1,
        "created_ns": 1_700_000_000_000_000_000,
        "started_ns": 1_700_000_001_000_000_000,
        "ended_ns": 1_700_000_013_000_000_000,
    }
    return scheduler_pb2.Job(**{**fields, **changes})


def event(seq: int, kind: str, state: str, **changes: Any) -> scheduler_pb2.Event:
    """An event of that job."""
    number = scheduler_pb2.JobState.Value(f"JOB_STATE_{state.upper()}")
    return scheduler_pb2.Event(
        seq=seq,
        kind="Job",
        object_id=JOB_ID,
        object_name="digits",
        type=kind,
        state=number,
        actor="scheduler",
        **changes,
    )


def line(seq: int, text: str, *, rank: int = 0, node: int = 0) -> common_pb2.LogLine:
    """A line of output."""
    return common_pb2.LogLine(seq=seq, text=text, rank=rank, node=node, stream="output", time_ns=seq)


def lines(*items: common_pb2.LogLine) -> launcher_pb2.FollowEvent:
    """Live output."""
    return launcher_pb2.FollowEvent(lines=launcher_pb2.FollowEvent.Lines(lines=items))


def started(number: int) -> launcher_pb2.FollowEvent:
    """An attempt begins."""
    return launcher_pb2.FollowEvent(started=launcher_pb2.FollowEvent.AttemptStarted(number=number))


Step = Any
"""A message to send, an `asyncio.Event` to wait for, a `Refusal`, or the word "die": the server stops at once."""


@dataclass
class ScriptedYard:
    """What it answers, and what it was asked."""

    folder: Path
    job: scheduler_pb2.Job = field(default_factory=job)
    jobs: list[scheduler_pb2.Job] = field(default_factory=list)
    refusals: dict[str, list[Refusal | None]] = field(default_factory=dict)
    events: list[list[Step]] = field(default_factory=list)
    live: list[list[Step]] = field(default_factory=list)
    stored: list[metrics_pb2.StoredLine] = field(default_factory=list)
    series: list[metrics_pb2.SeriesInfo] = field(default_factory=list)
    versions: list[artifacts_pb2.Version] = field(default_factory=list)
    details: dict[str, artifacts_pb2.VersionDetail] = field(default_factory=dict)
    """Versions with their files, by reference."""
    runs: list[metrics_pb2.FoundRun] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    """Content of single files by "REFERENCE/PATH"."""
    admin: dict[str, list[Any]] = field(default_factory=dict)
    """Answers of the administration by "service.Method"; of a method that does not stream, the first."""
    answers_detach: bool = True
    """Whether a client that says that it leaves its job gets an answer."""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    port: int = field(default_factory=free_port)

    async def start(self) -> None:
        """Serves on the port of the last time, and says so in the home."""
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(_Scheduler(self), self.server)
        launcher_pb2_grpc.add_LauncherServiceServicer_to_server(_Launcher(self), self.server)
        metrics_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), self.server)
        artifacts_pb2_grpc.add_ArtifactServiceServicer_to_server(_Artifacts(self), self.server)
        yard_pb2_grpc.add_YardServiceServicer_to_server(_Yard(self), self.server)
        admin_pb2_grpc.add_SchedulerAdminServiceServicer_to_server(_Admin(self, "scheduler"), self.server)
        admin_pb2_grpc.add_MetricsAdminServiceServicer_to_server(_Admin(self, "metrics"), self.server)
        admin_pb2_grpc.add_ArtifactAdminServiceServicer_to_server(_Admin(self, "artifacts"), self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()
        (self.folder / "token").write_text(TOKEN)
        self.publish()

    def publish(self, *, ephemeral: bool = False) -> None:
        start_time = home.process_start_time(os.getpid())
        assert start_time is not None
        yard = home.YardFile(
            endpoint=f"127.0.0.1:{self.port}",
            pid=os.getpid(),
            start_time=start_time,
            boot_id=home.boot_id(),
            version="0",
            ephemeral=ephemeral,
        )
        home.write_endpoint(self.folder, yard)

    async def stop(self) -> None:
        await self.server.stop(None)

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    def asked(self, method: str) -> list[Any]:
        """The requests of one method."""
        return [request for name, request in self.calls if name == method]

    async def enter(self, method: str, request: Any, context: Context) -> None:
        """What every call goes through: the token, the record, the refusals of the script."""
        metadata = dict(context.invocation_metadata() or ())
        if metadata.get("authorization") != f"Bearer {TOKEN}":
            await Refusal(grpc.StatusCode.UNAUTHENTICATED, "no such token", "BadToken").give(context)
        self.calls.append((method, request))
        planned = self.refusals.get(method)
        if planned and (refusal := planned.pop(0)) is not None:
            await refusal.give(context)

    async def play(self, steps: list[Step], context: Context) -> AsyncIterator[Any]:
        for step in steps:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Refusal):
                await step.give(context)
            elif step == "die":
                restarting = asyncio.create_task(self.restart())
                await asyncio.shield(restarting)
            else:
                yield step


def _unary(method: str, answer: Callable[[ScriptedYard, Any], Any]) -> Any:
    async def call(self: Any, request: Any, context: Context) -> Any:
        await self.yard.enter(method, request, context)
        return answer(self.yard, request)

    return call


@dataclass
class _Servicer:
    yard: ScriptedYard


def _batch(yard: ScriptedYard, request: scheduler_pb2.SubmitBatchRequest) -> scheduler_pb2.SubmitBatchResponse:
    """Documents that say "bad" are wrong; those that say "path" have code to pack."""
    answer = scheduler_pb2.SubmitBatchResponse()
    for each in request.requests:
        result = answer.results.add()
        if "bad" in each.document.text:
            result.code, result.message = grpc.StatusCode.INVALID_ARGUMENT.value[0], "the document is wrong"
            result.problems.problems.add(field="spec.command", message="is missing")
        elif "path" in each.document.text:
            result.code, result.message = grpc.StatusCode.FAILED_PRECONDITION.value[0], "code has to be packed"
            result.reason = "CodeNotPacked"
        else:
            result.submitted.job.CopyFrom(job("queued", name=each.document.text.strip()))
    return answer


def _page(yard: ScriptedYard, request: scheduler_pb2.ListJobsRequest) -> scheduler_pb2.ListJobsResponse:
    """Pages of two."""
    start = int(request.page_token or 0)
    more = str(start + 2) if start + 2 < len(yard.jobs) else ""
    return scheduler_pb2.ListJobsResponse(jobs=yard.jobs[start : start + 2], next_page_token=more)


class _Scheduler(_Servicer, scheduler_pb2_grpc.SchedulerServiceServicer):
    Submit = _unary("Submit", lambda yard, _: scheduler_pb2.SubmitResponse(job=yard.job, created=True))
    SubmitBatch = _unary("SubmitBatch", _batch)
    Plan = _unary("Plan", lambda yard, _: scheduler_pb2.PlanResponse(resolved=_RESOLVED, position=1))
    GetJob = _unary("GetJob", lambda yard, _: yard.job)
    ListJobs = _unary("ListJobs", _page)
    CancelJob = _unary("CancelJob", lambda yard, _: yard.job)
    RetryJob = _unary("RetryJob", lambda yard, _: yard.job)
    ListEvents = _unary(
        "ListEvents",
        lambda yard, _: scheduler_pb2.ListEventsResponse(events=yard.events[0] if yard.events else []),
    )
    ExplainJob = _unary(
        "ExplainJob", lambda yard, _: scheduler_pb2.Explanation(job=yard.job, summary="It waits.", position=2)
    )
    ListPools = _unary("ListPools", lambda yard, _: scheduler_pb2.ListPoolsResponse())

    async def Watch(self, request: Any, context: Context) -> AsyncIterator[scheduler_pb2.Event]:
        copy = scheduler_pb2.WatchRequest.FromString(request.SerializeToString())
        await self.yard.enter("Watch", copy, context)
        if request.from_now:
            await asyncio.Event().wait()
        async for item in self.yard.play(self.yard.events.pop(0) if self.yard.events else [], context):
            if item.state:
                self.yard.job.state = item.state
            yield item


class _Launcher(_Servicer, launcher_pb2_grpc.LauncherServiceServicer):
    Describe = _unary("Describe", lambda yard, _: launcher_pb2.DescribeResponse())
    Stacks = _unary(
        "Stacks",
        lambda yard, _: launcher_pb2.StacksResponse(
            ranks=[launcher_pb2.RankStacks(rank=0, pid=7, text="main (train.py:3)")]
        ),
    )

    async def GetUsage(self, request: Any, context: Context) -> admin_pb2.GetUsageResponse:
        await self.yard.enter("launcher.GetUsage", request, context)
        answer: admin_pb2.GetUsageResponse = self.yard.admin["launcher.GetUsage"][0]
        return answer

    async def Follow(self, request: Any, context: Context) -> AsyncIterator[launcher_pb2.FollowEvent]:
        await self.yard.enter("Follow", request, context)
        async for item in self.yard.play(self.yard.live.pop(0) if self.yard.live else [], context):
            yield item

    async def Shell(self, requests: Any, context: Context) -> AsyncIterator[launcher_pb2.ShellOutput]:
        await self.yard.enter("Shell", None, context)
        async for request in requests:
            match request.WhichOneof("input"):
                case "open":
                    words = " ".join(request.open.command)
                    yield launcher_pb2.ShellOutput(data=f"opened {words} tty={request.open.tty}\n".encode())
                case "stdin":
                    yield launcher_pb2.ShellOutput(data=request.stdin.upper())
                case "close_stdin":
                    yield launcher_pb2.ShellOutput(exit_code=9)


def _found(yard: ScriptedYard, request: metrics_pb2.SearchRunsRequest) -> metrics_pb2.SearchRunsResponse:
    """Pages of two; of filters, a name or the beginning of an id, at the end and in quotes, is understood."""
    wanted = [run for run in yard.runs if not request.run_ids or run.run.id in request.run_ids]
    if request.filter.startswith("name ="):
        text = request.filter.split('"')[-2].removesuffix("%")
        wanted = [run for run in wanted if run.run.name == text or run.run.id.startswith(text)]
    start = int(request.page_token or 0)
    more = str(start + 2) if start + 2 < len(wanted) else ""
    return metrics_pb2.SearchRunsResponse(runs=wanted[start : start + 2], next_page_token=more)


class _Metrics(_Servicer, metrics_pb2_grpc.MetricsServiceServicer):
    SearchRuns = _unary("SearchRuns", _found)
    ListSeries = _unary("ListSeries", lambda yard, _: metrics_pb2.ListSeriesResponse(series=yard.series))
    QuerySeries = _unary(
        "QuerySeries",
        lambda yard, _: metrics_pb2.QuerySeriesResponse(
            series=[
                metrics_pb2.Series(name=each.name, step=[1, 2], value=[1.0, each.last_value], total=2)
                for each in yard.series
            ]
        ),
    )

    async def ReadLogs(self, request: Any, context: Context) -> AsyncIterator[metrics_pb2.ReadLogsResponse]:
        await self.yard.enter("ReadLogs", request, context)
        wanted = [each for each in self.yard.stored if not request.attempt or each.attempt == request.attempt]
        if request.tail:
            wanted = wanted[-request.tail :]
        yield metrics_pb2.ReadLogsResponse(lines=wanted)


class _Artifacts(_Servicer, artifacts_pb2_grpc.ArtifactServiceServicer):
    FindMissing = _unary("FindMissing", lambda yard, request: artifacts_pb2.FindMissingResponse(hashes=request.hashes))
    Commit = _unary(
        "Commit", lambda yard, request: artifacts_pb2.Version(name=request.name, number=4, kind=request.kind)
    )
    ListVersions = _unary("ListVersions", lambda yard, _: artifacts_pb2.ListVersionsResponse(versions=yard.versions))
    GetVersion = _unary(
        "GetVersion",
        lambda yard, request: yard.details.get(
            request.reference, artifacts_pb2.VersionDetail(version=artifacts_pb2.Version(id=request.reference))
        ),
    )

    async def ReadFile(self, request: Any, context: Context) -> AsyncIterator[artifacts_pb2.ReadFileResponse]:
        await self.yard.enter("ReadFile", request, context)
        content = self.yard.files.get(f"{request.reference}/{request.path}")
        if content is None:
            await Refusal(grpc.StatusCode.NOT_FOUND, f"there is no {request.reference}", "VersionNotFound").give(
                context
            )
        else:
            yield artifacts_pb2.ReadFileResponse(data=content)

    async def PutChunks(self, requests: Any, context: Context) -> artifacts_pb2.PutChunksResponse:
        chunks = [chunk async for chunk in requests]
        await self.yard.enter("PutChunks", chunks, context)
        return artifacts_pb2.PutChunksResponse(stored=len(chunks))


@dataclass
class _Admin(_Servicer):
    """What the three services of that kind have in common."""

    service: str

    async def _only(self, method: str, request: Any, context: Context) -> Any:
        await self.yard.enter(f"{self.service}.{method}", request, context)
        return self.yard.admin[f"{self.service}.{method}"][0]

    async def GetUsage(self, request: Any, context: Context) -> Any:
        return await self._only("GetUsage", request, context)

    async def Maintain(self, request: Any, context: Context) -> Any:
        return await self._only("Maintain", request, context)

    async def ListAdminEvents(self, request: Any, context: Context) -> admin_pb2.ListAdminEventsResponse:
        await self.yard.enter(f"{self.service}.ListAdminEvents", request, context)
        kept = self.yard.admin.get(f"{self.service}.ListAdminEvents", [])
        wanted = [each for each in kept if request.object_name in ("", each.object_name)]
        return admin_pb2.ListAdminEventsResponse(events=[each for each in wanted if each.seq > request.after_seq])

    async def Verify(self, request: Any, context: Context) -> AsyncIterator[Any]:
        await self.yard.enter(f"{self.service}.Verify", request, context)
        async for item in self.yard.play(self.yard.admin.get(f"{self.service}.Verify", []), context):
            yield item

    async def Backup(self, request: Any, context: Context) -> AsyncIterator[Any]:
        await self.yard.enter(f"{self.service}.Backup", request, context)
        async for item in self.yard.play(self.yard.admin.get(f"{self.service}.Backup", []), context):
            yield item


class _Yard(_Servicer, yard_pb2_grpc.YardServiceServicer):
    Info = _unary(
        "Info", lambda yard, _: yard_pb2.InfoResponse(version="0.1.0", pid=os.getpid(), home=str(yard.folder))
    )

    async def Attach(self, requests: Any, context: Context) -> AsyncIterator[yard_pb2.AttachResponse]:
        await self.yard.enter("Attach", None, context)
        try:
            async for request in requests:
                self.yard.calls.append(("hold", request))
                if request.job_id and request.on_loss == request.ON_LOSS_KEEP and not self.yard.answers_detach:
                    await asyncio.Event().wait()
                yield yard_pb2.AttachResponse()
        finally:
            self.yard.calls.append(("left", None))


def document(**spec: Any) -> str:
    """The text of a small job file."""
    return json.dumps(
        {
            "apiVersion": "trainyard.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "digits"},
            "spec": {"command": ["true"], **spec},
        }
    )
