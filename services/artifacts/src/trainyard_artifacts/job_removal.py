"""What of a job's artifacts goes with it: its checkpoints, except those that something else refers to.

Outputs stay, since their names are made for others, and so does code, which later jobs share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from servicekit.errors import DataLoss, InvalidArgument, NotFound
from servicekit.events import AdminEvent, Recorder, Subject
from sqlmodel import Session, col, select
from trainyard.artifacts import manifest

from trainyard_artifacts import catalog, fences, index
from trainyard_artifacts.domain.names import BEST, LATEST, parse_reference
from trainyard_artifacts.tables import AliasRow, InputRow, UseRow, VersionRow

_BY_THEMSELVES = (LATEST, BEST)  # aliases that a job's checkpoints get without a user


@dataclass(frozen=True, slots=True)
class Removal:
    """What the removal of a job deletes, and why it keeps the job's other versions."""

    deleted: Sequence[VersionRow]
    freed_bytes: int
    kept: Sequence[tuple[VersionRow, str]]


def plan(session: Session, workspace: str, job_id: str, references: Collection[str]) -> Removal:
    """What removing a job would do.

    Args:
        references: versions that other jobs will use.
    """
    query = select(VersionRow).where(
        VersionRow.workspace == workspace, VersionRow.job_id == job_id, col(VersionRow.deleted_ns).is_(None)
    )
    rows = session.exec(query.order_by(col(VersionRow.id))).all()
    wanted = _named_by(session, workspace, references)
    kept, deleted = [], []
    for row in rows:
        if why := _why_kept(session, row, wanted):
            kept.append((row, why))
        else:
            deleted.append(row)
    return Removal(deleted, _freed_bytes(session, workspace, deleted), kept)


def apply(session: Session, workspace: str, job_id: str, references: Collection[str], recorder: Recorder) -> Removal:
    """Deletes them and records it."""
    planned = plan(session, workspace, job_id, references)
    by_name: dict[str, list[VersionRow]] = {}
    for row in planned.deleted:
        by_name.setdefault(row.name, []).append(row)
    for name, rows in by_name.items():
        for row in rows:
            catalog.remove(session, row)
        numbers = ", ".join(str(row.number) for row in rows)
        message = f"{len(rows):,} versions deleted with job {job_id}: {numbers}"
        recorder.record(session, AdminEvent.VERSION_DELETED, Subject("Artifact", name, workspace=workspace), message)
    return planned


def _named_by(session: Session, workspace: str, references: Collection[str]) -> set[str]:
    """Ids of the versions that these references name."""
    found = set()
    for reference in references:
        try:
            found.add(catalog.find(session, workspace, parse_reference(reference)).id)
        except (NotFound, InvalidArgument):
            continue  # what it names is not there
    return found


def _why_kept(session: Session, row: VersionRow, wanted: Collection[str]) -> str:
    if row.kind != "checkpoint":
        return "an output of the job; 'yard artifacts rm' deletes it" if row.kind == "output" else "not a checkpoint"
    if row.id in wanted:
        return "an input of a job that has not ended"
    pins = session.exec(
        select(AliasRow.alias).where(AliasRow.version_id == row.id, col(AliasRow.alias).not_in(_BY_THEMSELVES))
    ).all()
    if pins:
        return f"has the alias {', '.join(sorted(pins))}"
    made = session.exec(
        select(VersionRow)
        .join(InputRow, col(InputRow.version_id) == col(VersionRow.id))
        .where(InputRow.input_id == row.id, col(VersionRow.deleted_ns).is_(None))
        .limit(1)
    ).first()
    if made is not None:
        return f"{made.name}@{made.number} was made from it"
    uses = select(UseRow).where(UseRow.version_id == row.id, col(UseRow.job_id) != row.job_id)
    for use in session.exec(uses):
        if fences.is_open(session, use.workspace, use.job_id, use.fence):
            return f"job {use.job_id} uses it"
    return ""


def _freed_bytes(session: Session, workspace: str, rows: Sequence[VersionRow]) -> int:
    """Bytes of the chunks that these versions hold and nothing else does."""
    held: Counter[bytes] = Counter()
    for row in rows:
        try:
            held.update(manifest.hashes(catalog.read_manifest(session, row)))
        except DataLoss:
            continue  # its chunks stay counted until a repair
    return index.held_only(session, workspace, held)
