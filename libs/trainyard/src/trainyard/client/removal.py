"""Removing jobs and runs: what that frees, what it leaves, and doing it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from trainyard_protos.v1 import artifacts_pb2, metrics_pb2, scheduler_pb2

from trainyard import errors
from trainyard.client.admin import AdminCalls
from trainyard.client.answers import Kept, Part, Removal
from trainyard.client.names import job_reference
from trainyard.client.runs import RunCalls

_REMOVE_DEADLINE_S = 600.0


class RemovalCalls(RunCalls, AdminCalls):
    """Jobs that have ended, and runs to which nothing writes, can be removed."""

    async def job_removal(self, job: str) -> Removal:
        """What removing a job would free and leave. Nothing changes.

        Args:
            job: a reference; a name has to be that of one job.

        Raises:
            NotFound: no job matches.
            Conflict: several jobs match, or the job has not ended.
        """
        answer = await self._delete_job(job, dry_run=True)
        return await self._describe(answer)

    async def remove_job(self, job: str) -> Removal:
        """Removes a job that has ended, with its attempts, runs and checkpoints; returns what that frees and leaves.

        The job is gone when this returns; launchers and services then remove what it left, also after a restart.

        Raises:
            NotFound: no job matches.
            Conflict: several jobs match, or the job has not ended.
        """
        planned = await self.job_removal(job)
        await self._delete_job(planned.id, dry_run=False)
        return planned

    async def _delete_job(self, job: str, *, dry_run: bool) -> scheduler_pb2.DeleteJobResponse:
        request = scheduler_pb2.DeleteJobRequest(workspace=self.workspace, id=job, dry_run=dry_run)
        return await self._connection.call(self._connection.scheduler.DeleteJob, request)

    async def _describe(self, answer: scheduler_pb2.DeleteJobResponse) -> Removal:
        job = answer.job
        folders = await self.attempt_usage([job.id])
        runs = await self._connection.call(
            self._connection.metrics.DeleteJobRuns,
            metrics_pb2.DeleteJobRunsRequest(workspace=self.workspace, job_id=job.id, dry_run=True),
        )
        stored = await self._connection.call(
            self._connection.artifacts.DeleteJobArtifacts,
            artifacts_pb2.DeleteJobArtifactsRequest(
                workspace=self.workspace, job_id=job.id, kept_references=answer.used_references, dry_run=True
            ),
        )
        of_job = [each for each in folders.usage if each.job_id == job.id]
        attempts = Part(
            "attempt folders", sum(each.bytes for each in of_job), sum(each.count for each in of_job), "attempts"
        )
        checkpoints = Part("checkpoints", stored.freed_bytes, len(stored.deleted), "versions")
        keeps = [Kept(f"{kept.version.name}@{kept.version.number}", kept.why) for kept in stored.kept]
        frees = [attempts, *_parts(runs.bytes, runs.runs), checkpoints]
        return Removal("job", job_reference(job) or job.id, job.id, frees, keeps, list(folders.unread))

    async def run_removal(self, of: str) -> Removal:
        """What removing a run would free. Nothing changes.

        Args:
            of: the id or the only name of a plain process's run; or a job, or the run of one of its attempts: then it
                is about the runs of all attempts of that job, which are one series.

        Raises:
            NotFound: there is none.
            Conflict: several are called that, or something writes to it.
        """
        return await self._runs(of, dry_run=True)

    async def remove_run(self, of: str) -> Removal:
        """Removes the run of a plain process, or all runs of a job, with logs and metrics; returns what that freed.

        Raises:
            NotFound: there is none.
            Conflict: several are called that, or something writes to it.
        """
        return await self._runs(of, dry_run=False)

    async def _runs(self, of: str, *, dry_run: bool) -> Removal:
        name, identifier, run_ids = await self._run_ids(of)
        request = metrics_pb2.DeleteRunsRequest(workspace=self.workspace, run_ids=run_ids, dry_run=dry_run)
        answer = await self._connection.call(self._connection.metrics.DeleteRuns, request, _REMOVE_DEADLINE_S)
        return Removal("run", name, identifier, _parts(answer.bytes, len(run_ids)))

    async def _run_ids(self, of: str) -> tuple[str, str, list[str]]:
        """Name, id and run ids of what a reference selects."""
        try:
            job = await self._only_job(of)
        except errors.NotFound:
            run_id = (await self.subject(of)).run_id
            [run] = [run async for run in self._found_runs(f'id = "{run_id}"')]
            if not run.job_id:
                return run.name or run.id, run.id, [run.id]
            name, job_id = f"{run.name or run.job_id} (all attempts)", run.job_id
        else:
            await self._refuse_plain_run(of, job)
            name, job_id = f"{job_reference(job)} (all attempts)", job.id
        run_ids = [run.id async for run in self._found_runs(f'job = "{job_id}"')]
        if not run_ids:
            raise errors.NotFound(f"job {name} has no run", reason="RunNotFound", hint="'yard runs list' lists them")
        return name, job_id, run_ids

    async def _refuse_plain_run(self, of: str, job: scheduler_pb2.Job) -> None:
        """Raises Conflict when what selects a job is the name of a plain process's run as well."""
        if of in (job.id, job_reference(job)) or of.startswith("@"):
            return
        named = [run async for run in self._found_runs(f"name = {json.dumps(of, ensure_ascii=False)}")]
        if plain := [run.id for run in named if not run.job_id]:
            raise errors.Conflict(
                f"'{of}' selects job {job_reference(job)} and is the name of run {plain[0]} of a plain process",
                reason="AmbiguousRun",
                hint=f"give {job_reference(job)} for the runs of the job, or {plain[0]} for the other run",
            )

    async def _only_job(self, of: str) -> scheduler_pb2.Job:
        try:
            return (await self._delete_job(of, dry_run=True)).job
        except errors.Conflict as error:
            if error.reason == "NotEnded":
                error.hint = f"{error.hint}; then remove its runs"
            raise

    async def _found_runs(self, filter: str) -> AsyncIterator[metrics_pb2.Run]:
        request = metrics_pb2.SearchRunsRequest(
            workspace=self.workspace, filter=filter, all_attempts=True, page_size=1000
        )
        while True:
            page = await self._connection.call(self._connection.metrics.SearchRuns, request)
            for found in page.runs:
                yield found.run
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token


def _parts(bytes: metrics_pb2.RunBytes, runs: int) -> list[Part]:
    parts = [
        Part("logs", bytes.logs),
        Part("metrics", bytes.points, runs, "runs"),
        Part("logs and metrics, not compacted", bytes.journals),
        Part("other files of runs", bytes.other),
    ]
    return [part for part in parts if part.bytes or part.what == "metrics"]
