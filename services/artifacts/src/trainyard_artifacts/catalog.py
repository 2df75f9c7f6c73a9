"""Versions and aliases in the database: functions over a session, each run inside of one transaction by the caller."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from servicekit.errors import AlreadyExists, DataLoss, FailedPrecondition, NotFound
from servicekit.events import AdminEvent, Recorder, Subject
from servicekit.ids import new_id, now_ns
from sqlalchemy import func
from sqlmodel import Session, col, select
from sqlmodel.sql.expression import SelectOfScalar
from trainyard.artifacts import manifest
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts import index
from trainyard_artifacts.domain.names import BEST, LATEST, ByAlias, ById, ByNumber, Reference
from trainyard_artifacts.domain.retention import score
from trainyard_artifacts.tables import AliasRow, InputRow, ManifestRow, VersionRow


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


def add(
    session: Session, request: pb.CommitRequest, encoded: bytes, digest: bytes, recorder: Recorder | None = None
) -> VersionRow:
    """Makes a version and moves its aliases, which `recorder` records.

    `request` was checked; the caller counts what its chunks are used by.

    "latest" moves as well, to outputs of an attempt only when they are published.

    Raises:
        FailedPrecondition: the artifact holds another kind.
    """
    metrics = request.checkpoint.metrics if request.HasField("checkpoint") else request.metrics
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
        metrics=json.dumps(dict(metrics), sort_keys=True),
    )
    session.add(row)
    session.add_all(InputRow(version_id=row.id, input_id=input) for input in set(request.inputs))
    session.add(ManifestRow(version_id=row.id, workspace=row.workspace, content=encoded))
    for alias in request.aliases:
        move_alias(session, row, alias, recorder)
    if not (row.kind == "output" and row.fence):
        _publish(session, row)
    session.flush()
    return row


def publish(session: Session, workspace: str, job_id: str, fence: int) -> list[str]:
    """Makes the outputs of an attempt the newest versions of their artifacts; returns the names of those."""
    query = select(VersionRow).where(
        VersionRow.workspace == workspace,
        VersionRow.job_id == job_id,
        VersionRow.fence == fence,
        col(VersionRow.published_ns).is_(None),
        col(VersionRow.deleted_ns).is_(None),
    )
    rows = session.exec(query.order_by(col(VersionRow.number))).all()
    for row in rows:
        _publish(session, row)
    session.flush()
    return sorted({row.name for row in rows})


def _publish(session: Session, row: VersionRow) -> None:
    query = living(row.workspace, row.name).where(col(VersionRow.published_ns).is_not(None))
    newest = session.exec(query.order_by(col(VersionRow.published_ns).desc()).limit(1)).first()
    row.published_ns = max(now_ns(), (newest.published_ns or 0) + 1 if newest is not None else 0)
    session.add(row)
    if not _arrived_late(session, row):
        point(session, row, LATEST)


def same_code(session: Session, request: pb.CommitRequest, digest: bytes) -> VersionRow | None:
    """The version of the artifact that has exactly this code already; None for other kinds, which may repeat."""
    if request.kind != "code":
        return None
    query = living(request.workspace, request.name).where(VersionRow.kind == "code", VersionRow.digest == digest)
    return session.exec(query.order_by(col(VersionRow.created_ns).desc()).limit(1)).first()


def store_again(session: Session, row: VersionRow, request: pb.CommitRequest, recorder: Recorder | None = None) -> None:
    """Makes a version of code the newest of its artifact: its content was stored again.

    Labels, where the request has some, replace those of the last time: the same files may be those of another commit.
    """
    newest = session.exec(living(row.workspace, row.name).order_by(col(VersionRow.created_ns).desc()).limit(1)).one()
    row.created_ns = max(now_ns(), newest.created_ns + 1)
    if request.labels:
        row.labels = json.dumps(dict(request.labels), sort_keys=True)
    session.add(row)
    for alias in request.aliases:
        move_alias(session, row, alias, recorder)
    point(session, row, LATEST)
    session.flush()


def oldest_first(rows: Sequence[VersionRow]) -> list[VersionRow]:
    """Versions of one artifact by age, which is not the order in which they were committed.

    Checkpoints of one attempt are as old as their step says, since uploads may overtake each other. Attempts, and all
    that no attempt made, follow each other by number. Code, which gets no second version when it is stored again, is as
    old as the last time, and an output as old as the success of its attempt; without that, it is older than all others.
    """
    newest: dict[tuple[str, int], int] = {}
    for row in rows:
        newest[_group(row)] = max(_turn(row), newest.get(_group(row), 0))
    return sorted(rows, key=lambda row: (newest[_group(row)], *_age(row)))


def _turn(row: VersionRow) -> int:
    """Grows from one version of an artifact to the next; all of them are of one kind."""
    if row.kind == "output":
        return row.published_ns or 0
    return row.created_ns if row.kind == "code" else row.number


def _group(row: VersionRow) -> tuple[str, int]:
    """What is ordered by step: the checkpoints of one attempt. Any other version is a group of its own."""
    by_step = row.checkpoint is not None and row.fence > 0
    return (row.job_id, row.fence) if by_step else ("", -row.number)


def _age(row: VersionRow) -> tuple[int, int]:
    step = 0 if row.checkpoint is None else pb.CheckpointInfo.FromString(row.checkpoint).step
    return step, row.number


def _arrived_late(session: Session, row: VersionRow) -> bool:
    """Whether the same attempt has already stored a checkpoint of a later step."""
    alias = session.get(AliasRow, (row.workspace, row.name, LATEST))
    latest = session.get(VersionRow, alias.version_id) if alias else None
    return latest is not None and _group(latest) == _group(row) and _age(latest) > _age(row)


def follow_best(session: Session, row: VersionRow) -> None:
    """Moves "best" to a checkpoint that was just stored, unless the one that has it is better."""
    if (new := _rank(row)) is None:
        return
    alias = session.get(AliasRow, (row.workspace, row.name, BEST))
    present = session.get(VersionRow, alias.version_id) if alias is not None else None
    if present is None:
        _point_best(session, row.workspace, row.name)
    elif (old := _rank(present)) is None or new > old:
        point(session, row, BEST)
    session.flush()


def _point_best(session: Session, workspace: str, name: str) -> None:
    """Points "best" to the best checkpoint there is, if one has a value of its job's metric."""
    ranked = [(rank, row) for row in session.exec(living(workspace, name)) if (rank := _rank(row)) is not None]
    if ranked:
        point(session, max(ranked, key=lambda each: each[0])[1], BEST)


def _rank(row: VersionRow) -> tuple[float, int] | None:
    """Grows with how good a checkpoint is by its job's metric; of equals, the one that was stored later is better.

    None for what is no checkpoint, names no metric, or has no finite value of it.
    """
    if row.checkpoint is None:
        return None
    facts = pb.CheckpointInfo.FromString(row.checkpoint)
    value = facts.metrics.get(facts.best_metric, math.nan) if facts.best_metric else math.nan
    return (score(value, facts.best_mode), row.number) if math.isfinite(value) else None


def find(session: Session, workspace: str, reference: Reference, *, deleted: bool = False) -> VersionRow:
    """The version a reference names; with `deleted`, also one that was deleted, by its id or number.

    Raises:
        NotFound: there is none.
    """
    query = select(VersionRow).where(VersionRow.workspace == workspace)
    if not deleted:
        query = query.where(col(VersionRow.deleted_ns).is_(None))
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
            hint=_hint(session, workspace, reference),
        )
    return row


def _hint(session: Session, workspace: str, reference: Reference) -> str:
    if isinstance(reference, ByAlias) and reference.alias == BEST:
        newest = session.exec(
            living(workspace, reference.name).order_by(col(VersionRow.number).desc()).limit(1)
        ).first()
        if newest is not None and newest.checkpoint is not None:
            metric = pb.CheckpointInfo.FromString(newest.checkpoint).best_metric
            if metric:
                return f"no checkpoint has a finite value of '{metric}', the metric that the job names for it"
            return "the job names no metric for it; 'spec.checkpoints.keep.best' does"
    if isinstance(reference, ByAlias) and reference.alias == LATEST:
        stored = session.exec(
            living(workspace, reference.name).order_by(col(VersionRow.number).desc()).limit(1)
        ).first()
        if stored is not None:
            return (
                f"its versions are outputs of attempts that have not succeeded; name one by its number, "
                f"'{reference.name}@{stored.number}'"
            )
    return "'yard artifacts list' shows what there is"


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


def move_alias(session: Session, row: VersionRow, alias: str, recorder: Recorder | None) -> None:
    """Moves an alias to a version as a user asked, and records it, unless it points there already or is "latest"."""
    before = session.get(AliasRow, (row.workspace, row.name, alias))
    if before is not None and before.version_id == row.id:
        return
    old = session.get(VersionRow, before.version_id) if before is not None else None
    point(session, row, alias)
    if recorder is not None and alias != LATEST:
        message = f"{alias}: {called(old)} -> {called(row)}"
        recorder.record(session, AdminEvent.ALIAS_SET, subject(row), message)


def subject(row: VersionRow) -> Subject:
    """A version, as events name it."""
    return Subject("Artifact", row.name, row.id, row.workspace)


def called(row: VersionRow | None) -> str:
    """A version in an event's message."""
    return f"version {row.number}" if row is not None else "none"


def remove_as_asked(session: Session, row: VersionRow, recorder: Recorder) -> None:
    """Deletes a version as a user asked, and records it."""
    aliases = aliases_of(session, [row])[row.id]
    message = f"{called(row)}: {row.files:,} files, {row.size:,} bytes -> deleted"
    remove(session, row)
    for alias in aliases:
        left = session.get(AliasRow, (row.workspace, row.name, alias))
        now = session.get(VersionRow, left.version_id) if left is not None else None
        message += f"; {alias}: {called(row)} -> {called(now)}"
    recorder.record(session, AdminEvent.VERSION_DELETED, subject(row), message)


def remove(session: Session, row: VersionRow) -> None:
    """Deletes a version and gives its chunks up; "latest" and "best" move to what is left."""
    row.deleted_ns = now_ns()
    session.add(row)
    stored = session.get(ManifestRow, row.id)
    if stored is not None:
        # A damaged manifest says nothing about what it held: its chunks stay counted until a repair counts again.
        if manifest.digest(stored.content) == row.digest:
            held = manifest.hashes(pb.Manifest.FromString(stored.content))
            index.release(session, row.workspace, held, row.deleted_ns)
        session.delete(stored)
    aliases = session.exec(select(AliasRow).where(AliasRow.version_id == row.id)).all()
    for alias in aliases:
        session.delete(alias)
    session.flush()
    if any(alias.alias == LATEST for alias in aliases):
        published = col(VersionRow.published_ns).is_not(None)
        left = session.exec(living(row.workspace, row.name).where(published)).all()
        if left:
            point(session, oldest_first(left)[-1], LATEST)
    if any(alias.alias == BEST for alias in aliases) and row.checkpoint is not None:
        _point_best(session, row.workspace, row.name)


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
        metrics=metrics_of(row),
        deleted_ns=row.deleted_ns or 0,
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


def metrics_of(row: VersionRow) -> dict[str, float]:
    """Metrics of a version, those that are not finite included."""
    found: dict[str, float] = json.loads(row.metrics)
    return found


def living(workspace: str, name: str) -> SelectOfScalar[VersionRow]:
    """Versions of an artifact that were not deleted."""
    return select(VersionRow).where(
        VersionRow.workspace == workspace, VersionRow.name == name, col(VersionRow.deleted_ns).is_(None)
    )


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
