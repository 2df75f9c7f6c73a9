"""Summaries in the database: functions over a session, each run inside of one transaction by the caller."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from servicekit.store import upsert
from sqlalchemy import bindparam, delete, select, update
from sqlmodel import Session, SQLModel, col

from trainyard_metrics.tables import RunRow, SummaryRow, ValueRow

_RUNS = SQLModel.metadata.tables["metrics_run"]
_SUMMARIES = SQLModel.metadata.tables["metrics_summary"]
_VALUES = SQLModel.metadata.tables["metrics_value"]


@dataclass(frozen=True, slots=True)
class Saved:
    """What is written of one summary.

    Attributes:
        values: last values that changed, by name.
        afresh: whether names that are not in `values` are gone.
    """

    run_id: str
    packed: bytes
    updated_ns: int
    values: dict[str, float]
    afresh: bool


def save(session: Session, summaries: Sequence[Saved]) -> None:
    """Writes summaries of runs that are still there."""
    present = _present(session, [saved.run_id for saved in summaries])
    kept = [saved for saved in summaries if saved.run_id in present]
    _forget_values(session, [saved.run_id for saved in kept if saved.afresh])
    upsert(session, _SUMMARIES, [{"run_id": saved.run_id, "packed": saved.packed} for saved in kept], ["run_id"])
    values = [
        {"name": name, "run_id": saved.run_id, "value": None if math.isnan(value) else value}
        for saved in kept
        for name, value in saved.values.items()
    ]
    upsert(session, _VALUES, values, ["name", "run_id"])
    _touch(session, kept)


def load(session: Session, run_id: str) -> bytes | None:
    """A packed summary; None when the run never had one."""
    return session.scalar(select(col(SummaryRow.packed)).where(col(SummaryRow.run_id) == run_id))


def mark(session: Session, run_ids: Sequence[str], *, dirty: bool) -> None:
    """Says whether points of runs may be newer than their summaries."""
    session.execute(update(RunRow).where(col(RunRow.id).in_(run_ids)).values(dirty=dirty))


def dirty(session: Session) -> list[str]:
    """Runs whose summaries are to be made anew: those marked, and all later attempts of their jobs."""
    marked = session.execute(
        select(col(RunRow.id), col(RunRow.workspace), col(RunRow.job_id), col(RunRow.fence)).where(
            col(RunRow.dirty).is_(True)
        )
    ).all()
    found = {run_id for run_id, *_ in marked}
    for _, workspace, job_id, fence in marked:
        if job_id:
            found.update(later(session, workspace, job_id, fence))
    return sorted(found)


def later(session: Session, workspace: str, job_id: str, fence: int) -> list[str]:
    """Runs of later attempts of a job, oldest first."""
    query = select(col(RunRow.id)).where(
        col(RunRow.workspace) == workspace, col(RunRow.job_id) == job_id, col(RunRow.fence) > fence
    )
    return list(session.scalars(query.order_by(col(RunRow.fence))).all())


def remove(session: Session, run_ids: Sequence[str]) -> None:
    """Removes summaries of runs."""
    session.execute(delete(SummaryRow).where(col(SummaryRow.run_id).in_(run_ids)))
    _forget_values(session, run_ids)


def _present(session: Session, run_ids: Sequence[str]) -> set[str]:
    return set(session.scalars(select(col(RunRow.id)).where(col(RunRow.id).in_(run_ids))).all())


def _forget_values(session: Session, run_ids: Sequence[str]) -> None:
    if run_ids:
        session.execute(delete(ValueRow).where(col(ValueRow.run_id).in_(run_ids)))


def _touch(session: Session, summaries: Sequence[Saved]) -> None:
    if not summaries:
        return
    statement = update(_RUNS).where(_RUNS.c.id == bindparam("run")).values(updated_ns=bindparam("newest"))
    session.connection().execute(statement, [{"run": s.run_id, "newest": s.updated_ns} for s in summaries])
