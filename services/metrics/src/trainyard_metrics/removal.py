"""Removing runs: records first, so that a removal that was cut short is found and done again by the next."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from servicekit.events import AdminEvent, Recorder, Subject
from servicekit.store import Store
from sqlmodel import Session

from trainyard_metrics import runs, summary_rows
from trainyard_metrics.closing import close_job
from trainyard_metrics.runlogs import RunLogs
from trainyard_metrics.summaries import Summaries

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
    if recorder is not None:
        recorder.record(session, AdminEvent.RUNS_DELETED, SERVICE, in_words(run_ids))


def in_words(run_ids: Sequence[str]) -> str:
    """Runs in an event's message."""
    return f"{len(run_ids):,} runs deleted{': ' if run_ids else ''}{', '.join(run_ids)}"
