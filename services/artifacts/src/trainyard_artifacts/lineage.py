"""Which jobs worked with which versions, and what was made from what; deleted versions stay in it."""

from __future__ import annotations

from collections.abc import Sequence

from servicekit.auth import Principal
from servicekit.ids import now_ns
from sqlalchemy import ColumnElement
from sqlmodel import Session, col, select
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts import catalog
from trainyard_artifacts.access import may_read, require_readable
from trainyard_artifacts.tables import InputRow, UseRow, VersionRow

_MOST = 1000
"""Versions, or jobs, in one answer: the newest."""


def record(session: Session, row: VersionRow, consumer: pb.Producer) -> None:
    """Notes that a job works with a version; of an attempt that did before, nothing changes."""
    if session.get(UseRow, (row.id, consumer.job_id, consumer.attempt_id)) is None:
        session.add(
            UseRow(
                version_id=row.id,
                job_id=consumer.job_id,
                attempt_id=consumer.attempt_id,
                workspace=row.workspace,
                fence=consumer.fence,
                used_ns=now_ns(),
            )
        )


def require_inputs(session: Session, workspace: str, ids: Sequence[str], principal: Principal) -> None:
    """Raises PermissionDenied when a version is said to be made from one that the caller may not read."""
    query = select(VersionRow).where(VersionRow.workspace == workspace, col(VersionRow.id).in_(ids))
    for row in session.exec(query):
        require_readable(principal, row)


def of_version(session: Session, row: VersionRow, principal: Principal) -> pb.Lineage:
    """What a version was made from and by whom, what was made from it, and who worked with it.

    An attempt sees those versions that it may read, and the uses of its own job.
    """
    inputs = select(InputRow.input_id).where(InputRow.version_id == row.id)
    outputs = select(InputRow.version_id).where(InputRow.input_id == row.id)
    users = select(UseRow).where(UseRow.version_id == row.id).order_by(col(UseRow.used_ns).desc()).limit(_MOST)
    return pb.Lineage(
        made_from=_versions(session, row.workspace, col(VersionRow.id).in_(inputs), principal),
        made=_versions(session, row.workspace, col(VersionRow.id).in_(outputs), principal),
        used_by=[
            pb.Producer(job_id=use.job_id, attempt_id=use.attempt_id, fence=use.fence)
            for use in session.exec(users)
            if principal.kind == "user" or use.job_id == principal.job_id
        ],
        made_by=catalog.messages(session, [row])[0].producer,
    )


def of_job(session: Session, workspace: str, job_id: str) -> pb.Lineage:
    """What a job worked with, and what it made."""
    used = select(UseRow.version_id).where(UseRow.workspace == workspace, UseRow.job_id == job_id)
    return pb.Lineage(
        made_from=_versions(session, workspace, col(VersionRow.id).in_(used)),
        made=_versions(session, workspace, col(VersionRow.job_id) == job_id),
    )


def _versions(
    session: Session, workspace: str, condition: ColumnElement[bool], reader: Principal | None = None
) -> list[pb.Version]:
    query = select(VersionRow).where(VersionRow.workspace == workspace, condition)
    rows = session.exec(query.order_by(col(VersionRow.id).desc()).limit(_MOST)).all()
    return catalog.messages(session, [row for row in rows if reader is None or may_read(reader, row)])
