"""Retention: an artifact's own rule, else what the job that makes its checkpoints asked for, else its kind's.

What a job would resume from, its newest checkpoint, always stays: only its user deletes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servicekit.clock import CLOCK
from servicekit.errors import InvalidArgument
from servicekit.events import AdminEvent, Recorder, Subject
from sqlmodel import Session, col, select
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts import catalog, fences
from trainyard_artifacts.domain.names import LATEST, check_name
from trainyard_artifacts.domain.retention import Candidate, Rule, superfluous
from trainyard_artifacts.settings import Kind
from trainyard_artifacts.tables import RetentionRow, VersionRow

Defaults = Mapping[Kind, Rule]


def check(request: pb.Retention) -> Rule:
    """The rule that was asked for.

    Raises:
        InvalidArgument: BadName, BadRetention.
    """
    check_name(request.name)
    if min(request.keep_last, request.keep_best) < 0 or not 0 <= request.ttl_s < float("inf"):
        raise _bad("keep_last, keep_best and ttl_s are at least 0", "0 switches a rule off")
    if bool(request.keep_best) != bool(request.best_metric):
        raise _bad("keep_best and best_metric belong together", "give both, or neither")
    if request.best_mode not in (("min", "max") if request.keep_best else ("", "min", "max")):
        raise _bad(f"best_mode '{request.best_mode}'", "use 'min' or 'max'")
    return Rule(
        keep_last=request.keep_last,
        keep_best=request.keep_best,
        best_metric=request.best_metric,
        best_mode=request.best_mode,
        ttl_s=request.ttl_s,
    )


def _bad(message: str, hint: str) -> InvalidArgument:
    return InvalidArgument(message, reason="BadRetention", hint=hint)


def put(session: Session, workspace: str, name: str, rule: Rule, recorder: Recorder) -> None:
    """Gives an artifact a rule of its own, or takes it away when `rule` keeps all; records what that changes."""
    row = session.get(RetentionRow, (workspace, name))
    before = _own_rule(row) if row is not None else Rule()
    if rule == before or (row is None and rule.keeps_all):
        return
    message = f"{_in_words(before)} -> {_in_words(rule)}"
    if not rule.keeps_all:
        session.merge(RetentionRow(workspace=workspace, name=name, **rule.model_dump()))
    elif row is not None:
        session.delete(row)
    recorder.record(session, AdminEvent.RETENTION_SET, Subject("Artifact", name, workspace=workspace), message)


def _own_rule(row: RetentionRow) -> Rule:
    return Rule(**row.model_dump(exclude={"workspace", "name"}))


def _in_words(rule: Rule) -> str:
    values = rule.model_dump(exclude_defaults=True)
    return (
        ", ".join(f"{name}={value:g}" if name == "ttl_s" else f"{name}={value}" for name, value in values.items())
        or "no rule of its own"
    )


def get(session: Session, workspace: str, name: str, defaults: Defaults) -> Rule:
    """The rule that applies to an artifact: of several jobs' checkpoints, that of the newest."""
    newest = session.exec(catalog.living(workspace, name).order_by(col(VersionRow.number).desc()).limit(1)).first()
    return _rule(session, workspace, name, newest, defaults)[0]


def message(name: str, rule: Rule) -> pb.Retention:
    """A rule as it travels."""
    return pb.Retention(name=name, **rule.model_dump())


def apply(session: Session, workspace: str, name: str, defaults: Defaults, recorder: Recorder | None = None) -> int:
    """Deletes versions of an artifact that its rule does not keep; returns how many.

    Args:
        recorder: of the user who asked for it; None when it is done by itself.
    """
    newest = session.exec(catalog.living(workspace, name).order_by(col(VersionRow.number).desc()).limit(1)).first()
    if newest is None:
        return 0
    rule, of_job = _rule(session, workspace, name, newest, defaults)
    if rule.keeps_all:
        return 0
    query = catalog.living(workspace, name)
    rows = session.exec(query.where(VersionRow.job_id == newest.job_id) if of_job else query).all()
    by_id = {row.id: row for row in rows}
    gone = superfluous(rule, _candidates(session, rows), CLOCK.past_ns())
    for id in gone:
        catalog.remove(session, by_id[id])
    if gone and recorder is not None:
        numbers = ", ".join(str(by_id[id].number) for id in gone)
        message = f"{len(gone):,} of {len(rows):,} versions deleted by {_in_words(rule)}: {numbers}"
        recorder.record(session, AdminEvent.VERSIONS_EXPIRED, Subject("Artifact", name, workspace=workspace), message)
    return len(gone)


def publish(session: Session, workspace: str, job_id: str, fence: int, defaults: Defaults) -> None:
    """Makes the outputs of an attempt the newest versions of their artifacts, which the rules of these then see."""
    for name in catalog.publish(session, workspace, job_id, fence):
        apply(session, workspace, name, defaults)


def ruled(session: Session, defaults: Defaults) -> list[tuple[str, str]]:
    """Artifacts with a rule of their own or of their kind: (workspace, name)."""
    ruled = session.exec(select(RetentionRow.workspace, RetentionRow.name)).all()
    by_kind = (
        select(VersionRow.workspace, VersionRow.name)
        .where(col(VersionRow.kind).in_(list(defaults)), col(VersionRow.deleted_ns).is_(None))
        .distinct()
    )
    return sorted({*ruled, *(session.exec(by_kind).all() if defaults else ())})


def _rule(
    session: Session, workspace: str, name: str, newest: VersionRow | None, defaults: Defaults
) -> tuple[Rule, bool]:
    """The rule, and whether it is a job's and about its own versions alone."""
    row = session.get(RetentionRow, (workspace, name))
    if row is not None:
        return _own_rule(row), False
    if newest is not None and newest.checkpoint is not None:
        facts = pb.CheckpointInfo.FromString(newest.checkpoint)
        if facts.keep_last > 0:
            return _job_rule(facts), True
    default = defaults.get(newest.kind) if newest is not None else None  # type: ignore[call-overload]
    return default or Rule(), False


def _job_rule(facts: pb.CheckpointInfo) -> Rule:
    return Rule.model_validate(
        {
            "keep_last": facts.keep_last,
            "keep_best": int(bool(facts.best_metric)),
            "best_metric": facts.best_metric,
            "best_mode": facts.best_mode,
        }
    )


def _candidates(session: Session, rows: Sequence[VersionRow]) -> list[Candidate]:
    aliases = catalog.aliases_of(session, rows)
    by_age = catalog.oldest_first(rows)
    resumable = {row.job_id: row.id for row in by_age if row.kind == "checkpoint"}
    return [
        Candidate(
            id=row.id,
            order=order,
            created_ns=row.created_ns,
            metrics=catalog.metrics_of(row),
            pinned=bool(set(aliases[row.id]) - {LATEST})
            or resumable.get(row.job_id) == row.id
            or _may_succeed(session, row),
        )
        for order, row in enumerate(by_age)
    ]


def _may_succeed(session: Session, row: VersionRow) -> bool:
    """Whether it is an output whose attempt is not over."""
    return row.published_ns is None and fences.is_open(session, row.workspace, row.job_id, row.fence)
