"""Which files of which versions hold which chunks: worked out from manifests, version by version."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from servicekit.errors import DataLoss
from sqlmodel import Session, col, select
from trainyard.artifacts import manifest
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts import catalog
from trainyard_artifacts.tables import PartRow, VersionRow

_NAMED = 20


@dataclass(slots=True)
class Files:
    """Names of files, the first of them and how many there are."""

    named: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, name: str) -> None:
        """One more."""
        self.count += 1
        if len(self.named) < _NAMED:
            self.named.append(name)

    def __str__(self) -> str:
        more = self.count - len(self.named)
        return ", ".join(self.named) + (f" and {more:,} more" if more else "")


def name_of(row: VersionRow) -> str:
    """A version, for people."""
    return f"version {row.number} of '{row.name}' in workspace '{row.workspace}'"


def living_ids(session: Session) -> list[str]:
    """Every version that was not deleted, by workspace."""
    query = select(VersionRow.id).where(col(VersionRow.deleted_ns).is_(None))
    return list(session.exec(query.order_by(col(VersionRow.workspace), col(VersionRow.id))).all())


def files_with(session: Session, workspace: str, hashes: Collection[bytes]) -> Files:
    """Files that cannot be read without these chunks."""
    found = Files()
    query = select(VersionRow).where(VersionRow.workspace == workspace, col(VersionRow.deleted_ns).is_(None))
    for row in session.exec(query):
        for file in _tree(session, row).files:
            if any(chunk.hash in hashes for chunk in file.chunks):
                found.add(f"'{file.path}' of {name_of(row)}")
    return found


def count(session: Session) -> dict[str, Counter[bytes]]:
    """How many manifests hold each chunk, those of waiting parts included, by workspace.

    Raises:
        DataLoss: a manifest is damaged, so that nobody knows.
    """
    held: dict[str, Counter[bytes]] = defaultdict(Counter)
    for row in session.exec(select(VersionRow).where(col(VersionRow.deleted_ns).is_(None))):
        held[row.workspace].update(manifest.hashes(catalog.read_manifest(session, row)))
    for part in session.exec(select(PartRow)):
        held[part.workspace].update(manifest.hashes(pb.CommitRequest.FromString(part.request).manifest))
    return held


def _tree(session: Session, row: VersionRow) -> pb.Manifest:
    try:
        return catalog.read_manifest(session, row)
    except DataLoss:
        return pb.Manifest()  # a finding of its own
