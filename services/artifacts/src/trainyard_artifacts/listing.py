"""Lists of artifacts and versions, newest first, in pages."""

from __future__ import annotations

from servicekit.paging import page_size
from sqlalchemy import case, func
from sqlmodel import Session, col, select
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts import catalog
from trainyard_artifacts.tables import VersionRow

DEFAULT_PAGE = 100
MAX_PAGE = 1000
_MAX_PAGE_BYTES = 4 * 1024 * 1024


def versions(session: Session, workspace: str, request: pb.ListVersionsRequest) -> pb.ListVersionsResponse:
    """One page; its token is the id of its last version."""
    deleted = col(VersionRow.deleted_ns)
    which = deleted >= request.deleted_since_ns if request.deleted_since_ns else deleted.is_(None)
    query = select(VersionRow).where(VersionRow.workspace == workspace, which)
    if request.name:
        query = query.where(VersionRow.name == request.name)
    if request.kind:
        query = query.where(VersionRow.kind == request.kind)
    if request.job_id:
        query = query.where(VersionRow.job_id == request.job_id)
    if request.page_token:
        query = query.where(VersionRow.id < request.page_token)
    size = page_size(request.page_size, default=DEFAULT_PAGE, most=MAX_PAGE)
    rows = session.exec(query.order_by(col(VersionRow.id).desc()).limit(size + 1)).all()
    page = _within_message(catalog.messages(session, rows[:size]))
    more = len(page) < len(rows)
    return pb.ListVersionsResponse(versions=page, next_page_token=page[-1].id if more else "")


def _within_message(found: list[pb.Version]) -> list[pb.Version]:
    size = 0
    for index, version in enumerate(found):
        size += version.ByteSize()
        if index and size > _MAX_PAGE_BYTES:
            return found[:index]
    return found


def artifacts(session: Session, workspace: str, request: pb.ListArtifactsRequest) -> pb.ListArtifactsResponse:
    """Every artifact that has versions, by name, with its newest one; at most `MAX_PAGE`, the most recently made.

    Outputs of attempts that have not succeeded are the newest only where there is nothing else.
    """
    published = case((col(VersionRow.published_ns).is_not(None), VersionRow.id))
    newest = (
        select(func.coalesce(func.max(published), func.max(VersionRow.id)))
        .where(VersionRow.workspace == workspace, col(VersionRow.deleted_ns).is_(None))
        .group_by(VersionRow.name)
    )
    if request.kind:
        newest = newest.where(VersionRow.kind == request.kind)
    if request.job_id:
        newest = newest.where(VersionRow.job_id == request.job_id)
    query = select(VersionRow).where(col(VersionRow.id).in_(newest)).order_by(col(VersionRow.id).desc()).limit(MAX_PAGE)
    latest = catalog.messages(session, session.exec(query).all())
    counts = catalog.count_versions(session, workspace, [version.name for version in latest])
    return pb.ListArtifactsResponse(
        artifacts=[
            pb.ListArtifactsResponse.Artifact(
                name=version.name, kind=version.kind, versions=counts[version.name], latest=version
            )
            for version in sorted(latest, key=lambda version: version.name)
        ]
    )
