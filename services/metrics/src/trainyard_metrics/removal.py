"""Removing runs: records first, so that a removal that was cut short is found and done again by the next."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from servicekit.errors import FailedPrecondition, NotFound
from servicekit.events import AdminEvent, Recorder, Subject
from servicekit.store import Store
from sqlmodel import Session, col, delete, select

from trainyard_metrics import runs, summary_rows
from trainyard_metrics.closing import close_job, is_open
from trainyard_metrics.runlogs import RunLogs
from trainyard_metrics.summaries import Summaries
from trainyard_metrics.tables import RemovalRow, RunRow, UndeliveredRow

SERVICE = Subject("Service", "metrics")


class Removal:
    """Removes everything that is stored of runs."""

    def __init__(self, store: Store, logs: RunLogs, summaries: Summaries) -> None:
        self._store = store
        self._logs = logs
        self._summaries = summaries

    async def remove_job(self, workspace: str, job_id: str, recorder: Recorder) -> int:
        """Removes the runs of a job that was removed, of which nothing more is taken; returns how many they were.

        May be repeated: what was cut short is done then.
        """

        def close(session: Session) -> list[str]:
            first = close_job(session, workspace, job_id)
            rows = runs.of_job(session, workspace, job_id)
            run_ids = [row.id for row in rows]
            if first or rows:
                about = Subject("Job", rows[-1].name if rows else "", job_id, workspace)
                recorder.record(session, AdminEvent.RUNS_DELETED, about, in_words(run_ids))
            return run_ids

        run_ids = await self._store.write(close)
        await self.remove(run_ids)
        return len(run_ids)

    async def remove_as_asked(
        self, workspace: str, run_ids: Sequence[str], recorder: Recorder, *, dry_run: bool = False
    ) -> None:
        """Removes the run of a plain process, or all runs of one job whose attempts are over. What a crash cuts short
        is completed by the next `resume`.

        Args:
            dry_run: only refuse what would be refused.

        Raises:
            NotFound: there is no such run.
            FailedPrecondition: RunIsWritten, PartOfSeries.
        """
        if written := [run_id for run_id in run_ids if self._summaries.is_written(run_id)]:
            raise _is_written(written[0], "a process writes to it")

        def mark(session: Session) -> None:
            rows = _of_one_subject(session, workspace, run_ids)
            if dry_run:
                return
            for row in rows:
                session.merge(RemovalRow(run_id=row.id))
            first = rows[-1]
            about = Subject("Job", first.name, first.job_id, workspace) if first.job_id else _run(first)
            recorder.record(session, AdminEvent.RUNS_DELETED, about, in_words(run_ids))

        if dry_run:
            await self._store.read(mark)
            return
        await self._store.write(mark)
        await self.remove(run_ids)

    async def resume(self) -> None:
        """Completes removals that a crash cut short."""
        if run_ids := await self._store.read(lambda session: session.exec(select(RemovalRow.run_id)).all()):
            await self.remove(run_ids)

    async def remove(self, run_ids: Sequence[str], recorder: Recorder | None = None) -> None:
        """Removes runs. Whoever still writes to them gets NotFound.

        Args:
            recorder: records it; None when that is done elsewhere, or a rule removes them.
        """
        for run_id in run_ids:
            await self._logs.discard(run_id)
        self._summaries.forget(run_ids)
        await self._store.write(functools.partial(_remove, run_ids=run_ids, recorder=recorder))


def _remove(session: Session, run_ids: Sequence[str], recorder: Recorder | None) -> None:
    summary_rows.remove(session, run_ids)
    runs.remove(session, run_ids)
    session.execute(delete(RemovalRow).where(col(RemovalRow.run_id).in_(run_ids)))
    if recorder is not None:
        recorder.record(session, AdminEvent.RUNS_DELETED, SERVICE, in_words(run_ids))


def in_words(run_ids: Sequence[str]) -> str:
    """Runs in an event's message."""
    return f"{len(run_ids):,} runs deleted{': ' if run_ids else ''}{', '.join(run_ids)}"


def _of_one_subject(session: Session, workspace: str, run_ids: Sequence[str]) -> list[RunRow]:
    """The runs, which together are a plain process's or all of one job's, and to which nothing writes any more."""
    rows = [runs.find(session, run_id) for run_id in run_ids]
    for row in rows:
        if row.workspace != workspace:
            raise NotFound(f"no run {row.id} in workspace '{workspace}'", reason="RunNotFound")
        if not row.job_id:
            if len(rows) > 1:
                raise _part_of_series(row)
            continue
        if is_open(session, row):
            raise _is_written(row.id, f"attempt {row.fence} of job {row.job_id} is not over")
        if session.get(UndeliveredRow, row.id) is not None:
            raise _is_written(row.id, "its launcher still delivers records of it")
        if {each.id for each in runs.of_job(session, workspace, row.job_id)} != set(run_ids):
            raise _part_of_series(row)
    return rows


def _run(row: RunRow) -> Subject:
    return Subject("Run", row.name, row.id, row.workspace)


def _is_written(run_id: str, why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"run {run_id} cannot be removed: {why}", reason="RunIsWritten", hint="end what writes to it, then remove it"
    )


def _part_of_series(row: RunRow) -> FailedPrecondition:
    return FailedPrecondition(
        f"run {row.id} cannot be removed together with these, or without the others of its job",
        reason="PartOfSeries",
        hint="remove the run of one plain process, or all runs of one job",
    )
