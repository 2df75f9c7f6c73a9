"""How much of what there is."""

from __future__ import annotations

from servicekit.usage import Usage, database_bytes
from sqlalchemy import func, select
from sqlmodel import Session, col

from trainyard_artifacts.tables import ChunkRow, PackRow, VersionRow


def measure(session: Session) -> list[Usage]:
    """Bytes and counts: of the database, then by workspace of versions, packs, chunks and unused chunks."""
    versions = (
        select(col(VersionRow.workspace), func.sum(VersionRow.size), func.count())
        .where(col(VersionRow.deleted_ns).is_(None))
        .group_by(col(VersionRow.workspace))
    )
    packs = select(col(PackRow.workspace), func.sum(PackRow.size), func.count()).group_by(col(PackRow.workspace))
    chunks = select(col(ChunkRow.workspace), func.sum(ChunkRow.size), func.count()).group_by(col(ChunkRow.workspace))
    found = [Usage(what="database", bytes=database_bytes(session))]
    for what, unit, query in (
        ("versions", "versions", versions),
        ("packs", "packs", packs),
        ("chunks", "chunks", chunks),
        ("unused chunks", "chunks", chunks.where(col(ChunkRow.refs) == 0)),
        ("damaged chunks", "chunks", chunks.where(col(ChunkRow.damaged))),
    ):
        for workspace, size, count in session.execute(query):
            found.append(Usage(what=what, workspace=workspace, bytes=int(size), count=count, unit=unit))
    return found
