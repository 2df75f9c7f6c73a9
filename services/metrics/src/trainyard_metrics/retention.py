"""What is removed when it is old enough, by settings. Everything is kept without them.

Runs of jobs go with their jobs: the scheduler says when. A run that is being written is never old.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from servicekit.clock import CLOCK
from servicekit.errors import ServiceError
from servicekit.events import AdminEvent, Recorder, Subject
from servicekit.store import Store
from sqlalchemy import ColumnElement, and_, update
from sqlmodel import Session, col, select

from trainyard_metrics.removal import Removal
from trainyard_metrics.settings import Settings
from trainyard_metrics.storage.worker import CompactorFailed
from trainyard_metrics.tables import RunRow
from trainyard_metrics.upkeep import Upkeep

logger = logging.getLogger(__name__)

_AT_ONCE = 100
_FAILURES = (ServiceError, OSError, CompactorFailed)


@dataclass
class Retained:
    """What retention did.

    Attributes:
        runs: of plain processes that were removed.
        logs: runs whose lines were removed.
        failed: what did not work, in words.
    """

    runs: int
    logs: int
    failed: list[str]


class Retention:
    """Removes what is too old."""

    def __init__(self, store: Store, removal: Removal, upkeep: Upkeep, settings: Settings) -> None:
        self._store = store
        self._removal = removal
        self._upkeep = upkeep
        self._settings = settings

    async def keep(self) -> None:
        """Applies the rules again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(self._settings.retention_interval_s)
            try:
                done = await self.apply()
            except ServiceError as error:
                logger.warning("retention not applied", extra={"reason": error.reason})
                continue
            for failed in done.failed:
                logger.warning("retention failed", extra={"what": failed})

    async def apply(self, recorder: Recorder | None = None) -> Retained:
        """Applies the rules now.

        Args:
            recorder: of the user who asked for it; None when it is done by itself.

        Raises:
            Unavailable: the database is gone.
        """
        done = Retained(0, 0, [])
        if self._settings.plain_run_ttl_s:
            await self._remove_runs(done, recorder)
        if self._settings.log_ttl_s:
            await self._remove_logs(done, recorder)
        return done

    async def _remove_runs(self, done: Retained, recorder: Recorder | None) -> None:
        before = _before(self._settings.plain_run_ttl_s)
        while old := await self._store.read(lambda session: _old_plain_runs(session, before)):
            await self._removal.remove(old, recorder)
            done.runs += len(old)

    async def _remove_logs(self, done: Retained, recorder: Recorder | None) -> None:
        before = _before(self._settings.log_ttl_s)
        for run_id in await self._store.read(lambda session: _with_old_logs(session, before)):
            try:
                await self._upkeep.drop_lines(run_id)
            except _FAILURES as error:
                done.failed.append(f"lines of run {run_id}: {error}")
                continue
            await self._store.write(partial(_note_removed, run_id=run_id, recorder=recorder))
            done.logs += 1


def _before(ttl_s: float) -> int:
    return CLOCK.past_ns() - int(ttl_s * 1e9)


def _old_plain_runs(session: Session, before: int) -> Sequence[str]:
    query = select(RunRow.id).where(_is_old(before), col(RunRow.job_id) == "")
    return session.exec(query.order_by(col(RunRow.id)).limit(_AT_ONCE)).all()


def _with_old_logs(session: Session, before: int) -> Sequence[str]:
    query = select(RunRow.id).where(_is_old(before), col(RunRow.logs_removed).is_(False))
    return session.exec(query.order_by(col(RunRow.id))).all()


def _is_old(before: int) -> ColumnElement[bool]:
    """Quiet since then: a run that is written is marked."""
    return and_(col(RunRow.created_ns) < before, col(RunRow.updated_ns) < before, col(RunRow.dirty).is_(False))


def _note_removed(session: Session, run_id: str, recorder: Recorder | None) -> None:
    session.execute(update(RunRow).where(col(RunRow.id) == run_id).values(logs_removed=True))
    row = session.get(RunRow, run_id)
    if row is not None and recorder is not None:
        recorder.record(session, AdminEvent.LOGS_DELETED, Subject("Run", row.name, row.id, row.workspace))
