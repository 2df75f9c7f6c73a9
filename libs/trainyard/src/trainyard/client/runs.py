"""Calls about what a job wrote and measured (metrics) and about its processes (launcher)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from trainyard_protos.v1 import launcher_pb2, metrics_pb2

from trainyard.client.jobs import JobCalls

STACKS_DEADLINE_S = 60.0


class RunCalls(JobCalls):
    """Logs, series, live output, stacks and shells of jobs."""

    async def logs(
        self,
        job: str,
        *,
        attempt: int = 0,
        ranks: Sequence[int] = (),
        tail: int = 0,
        search: str = "",
        from_time_ns: int = 0,
    ) -> AsyncIterator[metrics_pb2.StoredLine]:
        """Stored lines, ordered by time within each attempt.

        Args:
            attempt: number of the attempt; 0 for all.
            ranks: global ranks, -1 for the agent; empty for all.
            tail: only the last lines; 0 for all.
            search: only lines that contain this text.
        """
        request = metrics_pb2.ReadLogsRequest(
            workspace=self.workspace,
            job_id=await self.job_id(job),
            attempt=attempt,
            ranks=ranks,
            tail=tail,
            search=search,
            from_time_ns=from_time_ns,
        )
        async for answer in self._connection.stream(self._connection.metrics.ReadLogs, request):
            for line in answer.lines:
                yield line

    async def series(self, job: str, names: Sequence[str] = ()) -> Sequence[metrics_pb2.SeriesInfo]:
        """Names, counts, last, least and greatest values of a job's series. `names` may be globs."""
        request = metrics_pb2.ListSeriesRequest(selector=await self._selector(job, names))
        return (await self._connection.call(self._connection.metrics.ListSeries, request)).series

    async def metrics(
        self, job: str, names: Sequence[str] = (), *, max_points: int = 1000
    ) -> Sequence[metrics_pb2.Series]:
        """Points of a job's series over all its attempts, at most `max_points` of each (0: all)."""
        request = metrics_pb2.QuerySeriesRequest(selector=await self._selector(job, names), max_points=max_points)
        return (await self._connection.call(self._connection.metrics.QuerySeries, request)).series

    async def _selector(self, job: str, names: Sequence[str]) -> metrics_pb2.SeriesSelector:
        return metrics_pb2.SeriesSelector(workspace=self.workspace, job_id=await self.job_id(job), names=names)

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
