"""Calls that find runs, show one, and lay several side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainyard_protos.v1 import artifacts_pb2, metrics_pb2

from trainyard import errors
from trainyard.client.names import DIFF_FILE
from trainyard.client.runs import RunCalls, Subject
from trainyard.client.store import ArtifactCalls

if TYPE_CHECKING:
    from trainyard.client.comparison import Code, Comparison
    from trainyard.client.records import Run

_PAGE = 500


class SearchCalls(RunCalls, ArtifactCalls):
    """Runs of jobs and of plain scripts."""

    async def runs(
        self,
        filter: str = "",
        *,
        order_by: str = "",
        names: Sequence[str] = (),
        all_attempts: bool = False,
        with_context: bool = False,
        limit: int | None = None,
    ) -> AsyncIterator[Run]:
        """Runs that match a filter; of a job, that of its newest attempt.

        Args:
            filter: for instance `metrics["val/accuracy"] > 0.9 and params.lr <= 0.1 and tags.team = "vision"`. There
                are metrics, params, spec, tags and id, job, name, notes, attempt, created, updated; = != < <= > >= in
                like; and, or, not. "" for all.
            order_by: for instance `metrics.loss, created desc`; default: newest first.
            names: series whose last values come with each run, at most 100.
            all_attempts: also the runs of earlier attempts.
            with_context: also where each ran and from which code.
            limit: at most so many; None for all.

        Raises:
            InvalidArgument: the filter or the order is wrong; the message says where.
        """
        from trainyard.client.records import run_of

        request = metrics_pb2.SearchRunsRequest(
            workspace=self.workspace,
            filter=filter,
            order_by=order_by,
            names=names,
            all_attempts=all_attempts,
            with_context=with_context,
            page_size=min(limit or _PAGE, _PAGE),
        )
        seen = 0
        while True:
            page = await self._connection.call(self._connection.metrics.SearchRuns, request)
            for found in page.runs:
                yield run_of(found, names)
                seen += 1
                if seen == limit:
                    return
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def run(self, of: str | Subject) -> Run:
        """One run with its context and the last value of every series; of a job, its newest attempt's.

        Raises:
            NotFound: there is none.
            Conflict: several are called that.
        """
        from trainyard.client.records import run_of

        subject = await self.subject(of)
        run_id = subject.run_id or await self._newest_run(subject.job_id)
        request = metrics_pb2.SearchRunsRequest(
            workspace=self.workspace, run_ids=[run_id], all_attempts=True, with_context=True
        )
        found = (await self._connection.call(self._connection.metrics.SearchRuns, request)).runs
        if not found:
            raise errors.NotFound(
                f"metrics has no run {run_id}", reason="RunNotFound", hint="'yard runs list' lists the runs there are"
            )
        series = sorted(await self.series(subject), key=lambda each: (each.name, -each.rank))
        return replace(
            run_of(found[0]),
            values={each.name: each.last_value for each in series},
            steps={each.name: each.last_step for each in series},
        )

    async def _newest_run(self, job_id: str) -> str:
        job = await self.get(job_id)
        if not job.attempt_id:
            raise errors.NotFound(
                f"{job.name} has no run yet: none of its attempts has begun",
                reason="NoRunYet",
                hint=f"yard explain {job.id}",
            )
        return job.attempt_id

    async def diff(self, run: Run) -> str:
        """What of a run's code differed from its commit, as `git apply` takes it; "" when nothing did or none is known.

        Raises:
            NotFound: the artifact that held it was deleted.
        """
        git = run.git
        if reference := git.get("diff_artifact"):
            return (await self.read_file(reference, DIFF_FILE)).decode(errors="replace")
        return str(git.get("diff", ""))

    async def compare(self, of: Sequence[str], *, everything: bool = False) -> Comparison:
        """What differs between runs: parameters, tags, notes, code, where they ran, and last values.

        Args:
            of: jobs or runs, two or more.
            everything: also what is the same, and what the agent samples.

        Raises:
            NotFound, Conflict: see `run`.
            InvalidArgument: fewer than two are given.
        """
        from trainyard.client.comparison import compare

        if len(of) < 2:
            raise errors.InvalidArgument("give two or more jobs or runs to compare", reason="TooFewRuns")
        runs = await asyncio.gather(*(self.run(each) for each in of))
        diffs = await asyncio.gather(*(self._diff_if_kept(run) for run in runs))
        return compare(runs, diffs, await self._codes(runs), everything=everything)

    async def _codes(self, runs: Sequence[Run]) -> list[Code]:
        """The code artifacts of runs; with their files where they are not all the same."""
        found = await asyncio.gather(*(self._code(run, files=False) for run in runs))
        if len({code.digest for code in found}) > 1:
            found = await asyncio.gather(*(self._code(run, files=True) for run in runs))
            if any(code.digest and not code.files for code in found):  # deleted: nothing to lay the others' beside
                found = [replace(code, files={}) for code in found]
        return list(found)

    async def _code(self, run: Run, *, files: bool) -> Code:
        from trainyard.client.comparison import Code, code_of

        facts = {name: str(run.code.get(name, "")) for name in ("artifact", "version", "digest")}
        reference = facts["version"] or facts["artifact"]
        known = Code(facts["artifact"], facts["digest"])
        if not reference or (known.digest and not files):
            return known
        request = artifacts_pb2.GetVersionRequest(
            workspace=self.workspace, reference=reference, without_manifest=not files
        )
        try:
            return code_of(await self._connection.call(self._connection.artifacts.GetVersion, request))
        except (errors.NotFound, errors.InvalidArgument):
            # It was deleted, or the reference is no reference: whoever opens a run writes its context.
            return known

    async def _diff_if_kept(self, run: Run) -> str:
        try:
            return await self.diff(run)
        except errors.NotFound:
            return ""
