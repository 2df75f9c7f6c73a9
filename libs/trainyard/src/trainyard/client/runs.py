"""Calls about what jobs and plain scripts wrote and measured (metrics) and about a job's processes (launcher)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from trainyard_protos.v1 import launcher_pb2, metrics_pb2

from trainyard import errors
from trainyard.client.connection import Outage
from trainyard.client.frames import AsyncLines, SeriesList
from trainyard.client.jobs import JobCalls

STACKS_DEADLINE_S = 60.0
_ID_BEGINNING = re.compile(r"[0-9a-f-]{4,36}")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose records are read: a job's, over all of its attempts, or one run's."""

    job_id: str = ""
    run_id: str = ""

    def selector(self, workspace: str, names: Sequence[str], include_hidden: bool) -> metrics_pb2.SeriesSelector:
        """Series of it."""
        selector = metrics_pb2.SeriesSelector(workspace=workspace, names=names, include_hidden=include_hidden)
        if self.run_id:
            selector.run_id = self.run_id
        else:
            selector.job_id = self.job_id
        return selector


def _nothing_called(handle: str, no_job: errors.NotFound) -> errors.NotFound:
    if handle.startswith("@"):  # which only jobs are called
        return no_job
    return errors.NotFound(
        f"there is no job or run '{handle}'",
        reason=no_job.reason,
        hint=f"{no_job.hint}; 'yard runs list' lists runs, and 4 characters of an id are the least",
    )


_STALLED = "ReaderStalled"
"""Reason of the error that ends a stream whose messages were not taken for a while."""


class RunCalls(JobCalls):
    """Logs, series, live output, stacks and shells.

    `of` is a reference to a job (see `JobCalls`), or else to a run: the id of an
    attempt, the id of a plain script's run, a unique prefix of one, or the unique name of a plain script's run.
    """

    async def subject(self, of: str | Subject) -> Subject:
        """The job, or else the run, that a handle names.

        Raises:
            NotFound: neither is called that.
            Conflict: several are.
        """
        if isinstance(of, Subject):
            return of
        try:
            return Subject(job_id=(await self.get(of)).id)
        except errors.NotFound as no_job:
            ids = await self._runs_called(of)
            if not ids:
                raise _nothing_called(of, no_job) from None
            if len(ids) > 1:
                raise errors.Conflict(
                    f"'{of}' names several runs: {', '.join(ids[:_SHOWN])}{' and more' if len(ids) > _SHOWN else ''}",
                    reason="AmbiguousRun",
                    hint="give more of the id; 'yard runs list' lists them",
                ) from None
            return Subject(run_id=ids[0])

    async def _runs_called(self, handle: str) -> list[str]:
        """Ids of the runs, at most one more than are shown, that have this name, or whose id begins so."""
        quoted = handle.replace("\\", "\\\\").replace('"', '\\"')
        wanted = f'name = "{quoted}"'
        if _ID_BEGINNING.fullmatch(handle):  # which a name may look like
            wanted += f' or id like "{quoted}%"'
        request = metrics_pb2.SearchRunsRequest(
            workspace=self.workspace, filter=wanted, all_attempts=True, page_size=_SHOWN + 1
        )
        found = await self._connection.call(self._connection.metrics.SearchRuns, request)
        return [each.run.id for each in found.runs]

    def logs(
        self,
        of: str | Subject,
        *,
        attempt: int = 0,
        ranks: Sequence[int] = (),
        tail: int = 0,
        search: str = "",
        regex: str = "",
        from_time_ns: int = 0,
    ) -> AsyncLines:
        """Stored lines, ordered by time within each attempt.

        A read that is cut off continues at its position: every line comes once, however slowly they are taken, and also
        when the yard is started again meanwhile.

        Args:
            attempt: number of the attempt; 0 for all.
            ranks: global ranks, -1 for the agent; empty for all.
            tail: only the last lines; 0 for all.
            search: only lines that contain this text.
            regex: only lines in which this RE2 pattern is found.
            from_time_ns: only lines from this moment on, UTC nanoseconds.
        """
        request = metrics_pb2.ReadLogsRequest(
            workspace=self.workspace,
            attempt=attempt,
            ranks=ranks,
            tail=tail,
            search=search,
            regex=regex,
            from_time_ns=from_time_ns,
        )
        return AsyncLines(self._read_logs(of, request))

    async def _read_logs(
        self, of: str | Subject, request: metrics_pb2.ReadLogsRequest
    ) -> AsyncIterator[metrics_pb2.StoredLine]:
        subject = await self.subject(of)
        request.job_id, request.run_id = subject.job_id, subject.run_id
        outage = Outage()
        while True:
            try:
                async for answer in self._connection.stream(self._connection.metrics.ReadLogs, request):
                    outage.over()
                    for line in answer.lines:
                        yield line
                    request.after.CopyFrom(answer.position)
                return
            except errors.NotRunning as lost:
                if not request.after.writer_id:  # nothing was read, or the yard is older and names no positions
                    raise
                if lost.reason != _STALLED:
                    await self._connection.until_back(lost, outage)

    async def series(
        self, of: str | Subject, names: Sequence[str] = (), *, include_hidden: bool = False
    ) -> Sequence[metrics_pb2.SeriesInfo]:
        """Names, counts, last, least and greatest values of series. `names` may be globs.

        Args:
            include_hidden: also what earlier attempts wrote beyond the checkpoint that a later one resumed from.
        """
        selector = (await self.subject(of)).selector(self.workspace, names, include_hidden)
        request = metrics_pb2.ListSeriesRequest(selector=selector)
        return (await self._connection.call(self._connection.metrics.ListSeries, request)).series

    async def metrics(
        self,
        of: str | Subject,
        names: Sequence[str] = (),
        *,
        max_points: int = 1000,
        from_step: int | None = None,
        to_step: int | None = None,
        include_hidden: bool = False,
    ) -> SeriesList:
        """Points of series, of a job over all its attempts, as columns of equal length.

        Args:
            names: exact names or globs; empty for all.
            max_points: of each series at most; least and greatest values are kept. 0: all.
            from_step, to_step: only these steps, both included.
            include_hidden: see `series`.
        """
        selector = (await self.subject(of)).selector(self.workspace, names, include_hidden)
        request = metrics_pb2.QuerySeriesRequest(
            selector=selector, from_step=from_step, to_step=to_step, max_points=max_points
        )
        return SeriesList((await self._connection.call(self._connection.metrics.QuerySeries, request)).series)

    async def live(
        self, job: str, *, attempt: int = 0, next_seq: dict[int, int] | None = None
    ) -> AsyncIterator[launcher_pb2.FollowEvent]:
        """The launcher's own stream of what a job does, from memory. `follow` joins it with what is stored."""
        request = launcher_pb2.FollowRequest(
            workspace=self.workspace, job_id=await self.job_id(job), attempt=attempt, next_seq=next_seq or {}
        )
        async for event in self._connection.stream(self._connection.launcher.Follow, request):
            yield event

    async def describe(self, job: str) -> launcher_pb2.DescribeResponse:
        """The live state of each node and worker."""
        request = launcher_pb2.DescribeRequest(workspace=self.workspace, job_id=await self.job_id(job))
        return await self._connection.call(self._connection.launcher.Describe, request)

    async def stacks(self, job: str) -> Sequence[launcher_pb2.RankStacks]:
        """Python stacks of every rank, now."""
        request = launcher_pb2.StacksRequest(workspace=self.workspace, job_id=await self.job_id(job))
        return (await self._connection.call(self._connection.launcher.Stacks, request, STACKS_DEADLINE_S)).ranks

    async def shell(self, inputs: AsyncIterator[launcher_pb2.ShellInput]) -> AsyncIterator[launcher_pb2.ShellOutput]:
        """A shell inside a worker: the first input is `open`; the last output is the exit code."""
        async for output in self._connection.stream(self._connection.launcher.Shell, inputs):
            yield output
