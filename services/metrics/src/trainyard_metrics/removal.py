"""Removing runs: records first, so that a removal that was cut short is found and done again by the next."""

from __future__ import annotations

from collections.abc import Sequence

from servicekit.store import Store
from sqlmodel import Session

from trainyard_metrics import runs, summary_rows
from trainyard_metrics.runlogs import RunLogs
from trainyard_metrics.summaries import Summaries


class Removal:
    """Removes everything that is stored of runs."""

    def __init__(self, store: Store, logs: RunLogs, summaries: Summaries) -> None:
        self._store = store
        self._logs = logs
        self._summaries = summaries

    async def remove(self, run_ids: Sequence[str]) -> None:
        """Removes runs. Whoever still writes to them gets NotFound."""
        for run_id in run_ids:
            await self._logs.discard(run_id)
        self._summaries.forget(run_ids)
        await self._store.write(lambda session: _remove(session, run_ids))


def _remove(session: Session, run_ids: Sequence[str]) -> None:
    summary_rows.remove(session, run_ids)
    runs.remove(session, run_ids)
