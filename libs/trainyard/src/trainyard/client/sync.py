"""The client for ordinary code: the asynchronous one, run on a thread of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trainyard_protos.v1 import launcher_pb2, metrics_pb2, scheduler_pb2, yard_pb2

from trainyard import errors
from trainyard.client.aio import AsyncClient
from trainyard.client.documents import Source
from trainyard.client.frames import Lines, SeriesByName, SeriesList
from trainyard.client.handles import AsyncJobHandle
from trainyard.client.loop import Loop
from trainyard.client.sync_store import ArtifactMethods

if TYPE_CHECKING:
    from trainyard.client.answers import BackedUp, Maintained, Removal, ServiceEvent, ServiceUsage, Verified
    from trainyard.client.comparison import Comparison
    from trainyard.client.records import Run


async def _open(arguments: Mapping[str, Any]) -> AsyncClient:
    return AsyncClient(**arguments)


class JobHandle:
    """One job of a yard."""

    def __init__(self, loop: Loop, job: AsyncJobHandle) -> None:
        self._loop = loop
        self._job = job

    @property
    def id(self) -> str:
        """The job's id."""
        return self._job.id

    @property
    def name(self) -> str:
        """The job's name."""
        return self._job.name

    def __repr__(self) -> str:
        return f"JobHandle({self.name!r}, {self.id!r})"

    def status(self) -> scheduler_pb2.Job:
        """The job now, with its attempts."""
        return self._loop.run(self._job.status())

    def wait(self, timeout_s: float | None = None, *, check: bool = True) -> scheduler_pb2.Job:
        """Waits for the job's end; see `AsyncJobHandle.wait`.

        Raises:
            JobFailed, JobCancelled: with `check`.
            NeverFits: no machine can hold it.
            TimeoutError: the job has not ended in time; it goes on.
        """
        return self._loop.run(self._job.wait(timeout_s, check=check))

    def logs(
        self, *, attempt: int = 0, ranks: Sequence[int] = (), tail: int = 0, search: str = "", regex: str = ""
    ) -> Lines:
        """Stored lines of output; see `AsyncClient.logs`."""
        lines = self._job.logs(attempt=attempt, ranks=ranks, tail=tail, search=search, regex=regex)
        return Lines(self._loop.iterate(lines))

    def follow(self) -> Iterator[launcher_pb2.FollowEvent]:
        """Output and progress as they come, until the job has ended."""
        return self._loop.iterate(self._job.follow())

    def events(self) -> Iterator[scheduler_pb2.Event]:
        """Every state change so far, oldest first."""
        return self._loop.iterate(self._job.events())

    def metrics(self, *names: str, max_points: int = 1000) -> SeriesByName:
        """Points of series by name."""
        return self._loop.run(self._job.metrics(*names, max_points=max_points))

    def values(self) -> Mapping[str, float]:
        """The last value of every series the script tracked."""
        return self._loop.run(self._job.values())

    def explain(self) -> scheduler_pb2.Explanation:
        """Why the job is in its state."""
        return self._loop.run(self._job.explain())

    def cancel(self, message: str = "") -> scheduler_pb2.Job:
        """Asks for the job's end."""
        return self._loop.run(self._job.cancel(message))

    def retry(self) -> scheduler_pb2.Job:
        """Puts the job, failed or cancelled, back to the queue."""
        return self._loop.run(self._job.retry())


class Client(ArtifactMethods):
    """A yard, for ordinary code. Safe to use from several threads. Arguments and errors are those of `AsyncClient`."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        token: str | None = None,
        ca_file: Path | None = None,
        workspace: str = "default",
    ) -> None:
        self._loop = Loop()
        arguments = {"endpoint": endpoint, "token": token, "ca_file": ca_file, "workspace": workspace}
        try:
            self._client = self._loop.run(_open(arguments))
        except BaseException:
            self._loop.close()
            raise

    def submit(
        self, source: Source, *, idempotency_key: str = "", owner: scheduler_pb2.Owner | None = None
    ) -> JobHandle:
        """Submits a job: the path of a file, its text, a mapping or a `TrainingJob`.

        Raises:
            InvalidSpec: the document is wrong; nothing was created. All its problems are in `problems`.
            NotRunning: the yard cannot be reached.
        """
        work = self._client.submit(source, idempotency_key=idempotency_key, owner=owner)
        return JobHandle(self._loop, self._loop.run(work))

    def submit_batch(self, sources: Iterable[Source]) -> list[JobHandle | errors.YardError]:
        """Submits many jobs; each succeeds or fails on its own."""
        answers = self._loop.run(self._client.submit_batch(sources))
        return [each if isinstance(each, errors.YardError) else JobHandle(self._loop, each) for each in answers]

    def plan(self, source: Source) -> scheduler_pb2.PlanResponse:
        """What submitting would do, without doing it."""
        return self._loop.run(self._client.plan(source))

    def job(self, job: str) -> JobHandle:
        """A handle of a job: by id, unique prefix of one, name, "digits#7", "@last" or "@-2"; see `JobCalls`."""
        return JobHandle(self._loop, self._loop.run(self._client.job(job)))

    def list(self, **filters: Any) -> Iterator[scheduler_pb2.Job]:
        """Jobs, newest first; filters are those of `AsyncClient.list`."""
        return self._loop.iterate(self._client.list(**filters))

    def events(self, job: str = "", after_seq: int = 0) -> Iterator[scheduler_pb2.Event]:
        """Events so far, oldest first; of all jobs when `job` is empty."""
        return self._loop.iterate(self._client.events(job, after_seq))

    def all_events(self) -> Iterator[ServiceEvent]:
        """Events of all services, oldest first."""
        return self._loop.iterate(self._client.all_events())

    def admin_events(self, service: str, *, object_name: str = "") -> Iterator[scheduler_pb2.Event]:
        """What users changed in "metrics" or "artifacts", oldest first."""
        return self._loop.iterate(self._client.admin_events(service, object_name=object_name))

    def watch(self, job: str = "", after_seq: int = 0, *, from_now: bool = False) -> Iterator[scheduler_pb2.Event]:
        """Events after a cursor, then new ones as they happen."""
        return self._loop.iterate(self._client.watch(job, after_seq, from_now=from_now))

    def pools(self) -> Sequence[scheduler_pb2.Pool]:
        """The pools of machines, with what is free on each."""
        return self._loop.run(self._client.pools())

    def runs(self, filter: str = "", **options: Any) -> Iterator[Run]:
        """Runs that match a filter, newest first; options are those of `AsyncClient.runs`.

        for run in yard.runs('params.lr < 0.1', order_by='metrics.loss', names=['loss']):
            print(run.name, run.values['loss'])
        """
        return self._loop.iterate(self._client.runs(filter, **options))

    def run(self, of: str) -> Run:
        """One run with its context and last values; of a job, its newest attempt's.

        Raises:
            NotFound: there is none. Conflict: several are called that.
        """
        return self._loop.run(self._client.run(of))

    def compare(self, of: Sequence[str], *, everything: bool = False) -> Comparison:
        """What differs between two or more jobs or runs; see `AsyncClient.compare`."""
        return self._loop.run(self._client.compare(of, everything=everything))

    def diff(self, run: Run) -> str:
        """What of a run's code differed from its commit; "" when nothing did or none is known."""
        return self._loop.run(self._client.diff(run))

    def series(self, of: str, names: Sequence[str] = (), **options: Any) -> Sequence[metrics_pb2.SeriesInfo]:
        """Names, counts and last values of a job's or run's series; options are those of `AsyncClient.series`."""
        return self._loop.run(self._client.series(of, names, **options))

    def metrics(self, of: str, names: Sequence[str] = (), **options: Any) -> SeriesList:
        """Points of a job's or run's series; options are those of `AsyncClient.metrics`."""
        return self._loop.run(self._client.metrics(of, names, **options))

    def logs(self, of: str, **options: Any) -> Lines:
        """Stored lines of a job or run; options are those of `AsyncClient.logs`."""
        return Lines(self._loop.iterate(self._client.logs(of, **options)))

    def usage(self) -> Sequence[ServiceUsage]:
        """How much each service stores, and how much room there is."""
        return self._loop.run(self._client.usage())

    def job_removal(self, job: str) -> Removal:
        """What removing a job would free and leave; see `AsyncClient.job_removal`."""
        return self._loop.run(self._client.job_removal(job))

    def remove_job(self, job: str) -> Removal:
        """Removes a job that has ended, with its attempts, runs and checkpoints; see `AsyncClient.remove_job`."""
        return self._loop.run(self._client.remove_job(job))

    def run_removal(self, of: str) -> Removal:
        """What removing a run would free; see `AsyncClient.run_removal`."""
        return self._loop.run(self._client.run_removal(of))

    def remove_run(self, of: str) -> Removal:
        """Removes the run of a plain process, or all runs of a job; see `AsyncClient.remove_run`."""
        return self._loop.run(self._client.remove_run(of))

    def verify(self, *, repair: bool = False) -> Iterator[Verified]:
        """Reads everything that is stored, and tells what is not as it was written; see `AsyncClient.verify`."""
        return self._loop.iterate(self._client.verify(repair=repair))

    def maintain(self) -> Sequence[Maintained]:
        """Compacts, applies retention and frees space now."""
        return self._loop.run(self._client.maintain())

    def backup(self, folder: Path | str) -> Iterator[BackedUp]:
        """Copies everything into a new folder, which appears when the iterator has ended; see `AsyncClient.backup`."""
        return self._loop.iterate(self._client.backup(folder))

    def stacks(self, job: str) -> Sequence[launcher_pb2.RankStacks]:
        """Python stacks of every rank of a job, now."""
        return self._loop.run(self._client.stacks(job))

    def describe(self, job: str) -> launcher_pb2.DescribeResponse:
        """The live state of each node and worker of a job."""
        return self._loop.run(self._client.describe(job))

    def info(self) -> yard_pb2.InfoResponse:
        """What runs behind this endpoint."""
        return self._loop.run(self._client.info())

    def close(self) -> None:
        """Closes the connection."""
        self._loop.run(self._client.close())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
