"""Versions and aliases in the database: functions over a session, each run inside of one transaction by the caller."""

from __future__ import annotations

import json
from collections.abc import Sequence

from servicekit.errors import AlreadyExists, DataLoss, FailedPrecondition, NotFound
from servicekit.ids import new_id, now_ns
from sqlalchemy import func
from sqlmodel import Session, col, delete, select
from sqlmodel.sql.expression import SelectOfScalar
from trainyard.artifacts import manifest
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts.domain.names import LATEST, ById, ByNumber, Reference
from trainyard_artifacts.domain.retention import Candidate, superfluous
from trainyard_artifacts.tables import AliasRow, ManifestRow, VersionRow


def committed(session: Session, workspace: str, key: str, digest: bytes) -> VersionRow | None:
    """The version that was committed under an idempotency key.

    Raises:
        AlreadyExists: the key was used for other content.
    """
    if not key:
        return None
    query = select(VersionRow).where(VersionRow.workspace == workspace, VersionRow.idempotency_key == key)
    row = session.exec(query).first()
    if row is not None and digest and row.digest != digest:
        raise AlreadyExists(
            f"idempotency key '{key}' already made version {row.id} with other content",
            reason="IdempotencyKeyReused",
            hint="use a new key for new content",
        )
    return row


def add(session: Session, request: pb.CommitRequest, encoded: bytes, digest: bytes) -> VersionRow:
    """Makes a version, moves its aliases, applies retention. `request` was checked.

    Raises:
        FailedPrecondition: the artifact holds another kind.
    """
    row = VersionRow(
        id=new_id(),
        workspace=request.workspace,
        name=request.name,
        number=_next_number(session, request),
        kind=request.kind,
        digest=digest,
        size=manifest.total_size(request.manifest),
        files=len(request.manifest.files),
        created_ns=now_ns(),
        idempotency_key=request.idempotency_key or None,
        job_id=request.producer.job_id,
        attempt_id=request.producer.attempt_id,
        fence=request.producer.fence,
        checkpoint=request.checkpoint.SerializeToString() if request.HasField("checkpoint") else None,
        labels=json.dumps(dict(request.labels), sort_keys=True),
        inputs=json.dumps(list(request.inputs)),
    )
    session.add(row)
    session.add(ManifestRow(version_id=row.id, workspace=row.workspace, content=encoded))
    for alias in {*request.aliases, LATEST}:
        point(session, row, alias)
    session.flush()
    if request.HasField("checkpoint"):
        _retain(session, row, request.checkpoint)
    return row


def find(session: Session, workspace: str, reference: Reference) -> VersionRow:
    """The version a reference names.

    Raises:
        NotFound: there is none, or it was deleted.
    """
    query = select(VersionRow).where(VersionRow.workspace == workspace, col(VersionRow.deleted_ns).is_(None))
    if isinstance(reference, ById):
        query = query.where(VersionRow.id == reference.id)
        described = f"version {reference.id}"
    elif isinstance(reference, ByNumber):
        query = query.where(VersionRow.name == reference.name, VersionRow.number == reference.number)
        described = f"version {reference.number} of artifact '{reference.name}'"
    else:
        alias = session.get(AliasRow, (workspace, reference.name, reference.alias))
        query = query.where(VersionRow.id == (alias.version_id if alias else ""))
        described = f"version '{reference.alias}' of artifact '{reference.name}'"
    row = session.exec(query).first()
    if row is None:
        raise NotFound(
            f"no {described} in workspace '{workspace}'",
            reason="VersionNotFound",
            hint="'yard artifacts list' shows what there is",
        )
    return row


def read_manifest(session: Session, row: VersionRow) -> pb.Manifest:
    """The verified manifest of a version.

    Raises:
        DataLoss: what is stored does not match the version's digest.
    """
    stored = session.get(ManifestRow, row.id)
    if stored is None or manifest.digest(stored.content) != row.digest:
        raise DataLoss(
            f"the manifest of version {row.id} ('{row.name}' {row.number}) is damaged",
            reason="ManifestDamaged",
            hint="use another version, or commit the files again",
            fields={"version": row.id},
        )
    return pb.Manifest.FromString(stored.content)


def point(session: Session, row: VersionRow, alias: str) -> None:
    """Moves an alias to a version."""
    session.merge(AliasRow(workspace=row.workspace, name=row.name, alias=alias, version_id=row.id))


def remove(session: Session, row: VersionRow) -> None:
    """Deletes a version; "latest" moves to the newest that is left."""
    row.deleted_ns = now_ns()
    session.add(row)
    session.exec(delete(ManifestRow).where(col(ManifestRow.version_id) == row.id))
    aliases = session.exec(select(AliasRow).where(AliasRow.version_id == row.id)).all()
    for alias in aliases:
        session.delete(alias)
    session.flush()
    if any(alias.alias == LATEST for alias in aliases):
        newest = session.exec(_living(row.workspace, row.name).order_by(col(VersionRow.number).desc()).limit(1)).first()
        if newest is not None:
            point(session, newest, LATEST)


def aliases_of(session: Session, rows: Sequence[VersionRow]) -> dict[str, list[str]]:
    """Aliases by version id, sorted."""
    found: dict[str, list[str]] = {row.id: [] for row in rows}
    query = select(AliasRow).where(col(AliasRow.version_id).in_(list(found))).order_by(col(AliasRow.alias))
    for alias in session.exec(query):
        found[alias.version_id].append(alias.alias)
    return found


def messages(session: Session, rows: Sequence[VersionRow]) -> list[pb.Version]:
    """Rows as they travel."""
    aliases = aliases_of(session, rows)
    return [_message(row, aliases[row.id]) for row in rows]


def _message(row: VersionRow, aliases: list[str]) -> pb.Version:
    version = pb.Version(
        id=row.id,
        workspace=row.workspace,
        name=row.name,
        number=row.number,
        kind=row.kind,
        digest=row.digest,
        size=row.size,
        files=row.files,
        created_ns=row.created_ns,
        aliases=aliases,
        producer=pb.Producer(job_id=row.job_id, attempt_id=row.attempt_id, fence=row.fence),
        labels=json.loads(row.labels),
        inputs=json.loads(row.inputs),
    )
    if row.checkpoint is not None:
        version.checkpoint.ParseFromString(row.checkpoint)
    return version


def _next_number(session: Session, request: pb.CommitRequest) -> int:
    query = (
        select(VersionRow)
        .where(VersionRow.workspace == request.workspace, VersionRow.name == request.name)
        .order_by(col(VersionRow.number).desc())
        .limit(1)
    )
    newest = session.exec(query).first()
    if newest is None:
        return 1
    if newest.kind != request.kind:
        raise FailedPrecondition(
            f"artifact '{request.name}' holds versions of kind '{newest.kind}', not '{request.kind}'",
            reason="KindMismatch",
            hint="choose another name",
        )
    return newest.number + 1


def _living(workspace: str, name: str) -> SelectOfScalar[VersionRow]:
    return select(VersionRow).where(
        VersionRow.workspace == workspace, VersionRow.name == name, col(VersionRow.deleted_ns).is_(None)
    )


def _retain(session: Session, row: VersionRow, rule: pb.CheckpointInfo) -> None:
    rows = session.exec(_living(row.workspace, row.name).where(VersionRow.job_id == row.job_id)).all()
    aliases = aliases_of(session, rows)
    candidates = [
        Candidate(
            id=other.id,
            number=other.number,
            metrics=dict(pb.CheckpointInfo.FromString(other.checkpoint or b"").metrics),
            pinned=bool(set(aliases[other.id]) - {LATEST}),
        )
        for other in rows
    ]
    by_id = {other.id: other for other in rows}
    for id in superfluous(rule, candidates):
        remove(session, by_id[id])


def count_versions(session: Session, workspace: str, names: Sequence[str]) -> dict[str, int]:
    """How many versions of each name there are."""
    query = (
        select(VersionRow.name, func.count())
        .where(
            VersionRow.workspace == workspace,
            col(VersionRow.name).in_(names),
            col(VersionRow.deleted_ns).is_(None),
        )
        .group_by(VersionRow.name)
    )
    return dict(session.exec(query).all())
