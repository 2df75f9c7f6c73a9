"""Runs in the database: functions over a session, each run inside of one transaction by the caller."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from servicekit.auth import Principal
from servicekit.errors import AlreadyExists, InvalidArgument, NotFound, stale_fence
from servicekit.ids import now_ns
from servicekit.paging import decode_token, encode_token, page_size
from servicekit.store import upsert
from sqlalchemy import Row, func, tuple_, update
from sqlmodel import Session, SQLModel, col, delete, select
from trainyard_protos.v1 import metrics_pb2 as pb

from trainyard_metrics.closing import admitted
from trainyard_metrics.domain.params import MAX_KEY, flatten, storable
from trainyard_metrics.domain.stitch import Attempt, Cut, Elsewhere, Resume
from trainyard_metrics.settings import Settings
from trainyard_metrics.tables import FenceRow, ParamRow, RunRow, SpecRow, TagRow, UndeliveredRow

DEFAULT_PAGE = 100
MAX_PAGE = 1000
_JOBS_PAGE = 200
_ENCODED = 6  # bytes of JSON that a character takes at most
_MAX_PAGE_BYTES = 4 * 1024 * 1024
_FLATTENED: dict[str, Any] = {"params": ParamRow, "spec": SpecRow}
_TAGS = SQLModel.metadata.tables["metrics_tag"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What never changes of a run."""

    id: str
    workspace: str
    job_id: str
    fence: int

    @property
    def job(self) -> tuple[str, str]:
        """Whose attempt it is; of a plain process, its own."""
        return self.workspace, self.job_id or self.id


def facts(row: RunRow) -> Facts:
    """The facts of a row."""
    return Facts(row.id, row.workspace, row.job_id, row.fence)


@dataclass(frozen=True, slots=True)
class Opened:
    """What opening a run did.

    Attributes:
        stitch: whether what it makes visible of earlier attempts is new.
    """

    run: pb.Run
    facts: Facts
    stitch: bool


def check(run: pb.Run, settings: Settings) -> None:
    """Refuses a run whose facts are too large or not JSON objects.

    Raises:
        InvalidArgument: TooLarge, NotAnObject.
    """
    sizes = {
        "params": (len(run.params), settings.max_params_bytes),
        "spec": (len(run.spec), settings.max_params_bytes),
        "notes": (len(run.notes), settings.max_params_bytes),
        "tags": (sum(len(key) + len(value) for key, value in run.tags.items()), settings.max_params_bytes),
        "name": (len(run.name), 256),
        "context": (len(run.context), settings.max_context_bytes),
        "rewind": (run.rewind.ByteSize(), settings.max_context_bytes),
    }
    for what, (size, limit) in sizes.items():
        _check_size(what, size, limit)
    for what, text in (("params", run.params), ("spec", run.spec), ("context", run.context)):
        _parse(what, text)


def _check_size(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise InvalidArgument(f"{what} of {size:,} bytes", reason="TooLarge", hint=f"at most {limit:,} are kept")


def _parse(what: str, text: str) -> dict[str, object]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidArgument(
            f"{what} is not a JSON object", reason="NotAnObject", hint='send, for instance, {"lr": 0.1}'
        )
    return value


def open_run(session: Session, run: pb.Run, settings: Settings, principal: Principal) -> Opened:
    """Registers a run, or adds to it when it is there. `run` was checked. A rewind, once given, stays.

    Raises:
        FailedPrecondition: StaleFence, AttemptEnded.
        PermissionDenied: NotGranted.
        AlreadyExists: the id is another job's.
        InvalidArgument: TooLarge, together with what is there.
    """
    admitted(session, principal, run.id)
    row = session.get(RunRow, run.id)
    stitch = row is None or (row.rewind is None and run.HasField("rewind"))
    if row is None:
        row = _create(session, run, principal.database_id, late=principal.kind == "delivery")
    elif (row.workspace, row.job_id, row.fence) != (run.workspace, run.job_id, run.fence):
        raise AlreadyExists(f"run {run.id} is of another job or attempt", reason="RunExists", hint="make a new run id")
    if row.rewind is None and run.HasField("rewind"):
        row.rewind = run.rewind.SerializeToString()
    stitch = stitch and _supersede_earlier(session, run)
    row.dirty = row.dirty or stitch
    _describe(session, row, run, settings)
    return Opened(message(row), facts(row), stitch)


def _create(session: Session, run: pb.Run, database_id: str, *, late: bool) -> RunRow:
    """A new run. One that comes late is of an attempt that is over: later ones may have begun, and it replaces none."""
    if run.job_id and not late:
        _check_fence(session, run)
    return RunRow(
        id=run.id,
        workspace=run.workspace,
        job_id=run.job_id,
        fence=run.fence,
        created_ns=run.created_ns or now_ns(),
        superseded=late and _has_later(session, run),
        database_id=database_id,
    )


def _has_later(session: Session, run: pb.Run) -> bool:
    later = select(RunRow.id).where(
        col(RunRow.workspace) == run.workspace, col(RunRow.job_id) == run.job_id, col(RunRow.fence) > run.fence
    )
    return session.exec(later.limit(1)).first() is not None


def _supersede_earlier(session: Session, run: pb.Run) -> bool:
    """Whether there are earlier attempts."""
    if not run.job_id:
        return False
    earlier = update(RunRow).where(
        col(RunRow.workspace) == run.workspace, col(RunRow.job_id) == run.job_id, col(RunRow.fence) < run.fence
    )
    return bool(session.connection().execute(earlier.values(superseded=True)).rowcount)


def _describe(session: Session, row: RunRow, run: pb.Run, settings: Settings) -> None:
    params, spec = _parse("params", run.params), _parse("spec", run.spec)
    row.params = json.dumps({**json.loads(row.params), **params})
    row.spec = json.dumps(spec) if spec else row.spec
    row.context = json.dumps({**json.loads(row.context), **_parse("context", run.context)})
    row.tags = json.dumps({**json.loads(row.tags), **run.tags})
    _check_whole(row, settings)
    row.notes = run.notes or row.notes
    row.name = run.name or row.name
    session.add(row)
    for what, facts in (("params", params), ("spec", spec)):
        if facts:
            _index(session, row, what)
    tags = {storable(key)[:MAX_KEY]: storable(value) for key, value in run.tags.items()}
    upsert(session, _TAGS, [{"key": key, "run_id": run.id, "value": tags[key]} for key in tags], ["key", "run_id"])


def _check_whole(row: RunRow, settings: Settings) -> None:
    """Without this, a run that is opened often enough fits into no answer."""
    kept = {
        "params": settings.max_params_bytes,
        "tags": settings.max_params_bytes,
        "context": settings.max_context_bytes,
    }
    for what, limit in kept.items():
        _check_size(f"all {what} of the run together: {what}", len(getattr(row, what)), _ENCODED * limit)


def _index(session: Session, row: RunRow, what: str) -> None:
    table = _FLATTENED[what]
    session.execute(delete(table).where(col(table.run_id) == row.id))
    found = [
        {"key": param.key, "run_id": row.id, "text": param.text, "number": param.number}
        for param in flatten(json.loads(getattr(row, what)))
    ]
    upsert(session, table.__table__, found, ["key", "run_id"])


def _check_fence(session: Session, run: pb.Run) -> None:
    row = session.get(FenceRow, (run.workspace, run.job_id))
    if row is None:
        row = FenceRow(workspace=run.workspace, job_id=run.job_id, fence=run.fence)
    if run.fence < row.fence:
        raise stale_fence(run.job_id, run.fence, row.fence)
    row.fence = run.fence
    session.add(row)


def find(session: Session, run_id: str) -> RunRow:
    """A run by id.

    Raises:
        NotFound
    """
    row = session.get(RunRow, run_id)
    if row is None:
        raise NotFound(f"no run {run_id}", reason="RunNotFound", hint="open the run before its first record")
    return row


def of_job(session: Session, workspace: str, job_id: str) -> list[RunRow]:
    """Runs of a job, oldest attempt first."""
    query = select(RunRow).where(RunRow.workspace == workspace, RunRow.job_id == job_id)
    return list(session.exec(query.order_by(col(RunRow.fence), col(RunRow.id))).all())


def page(session: Session, workspace: str, request: pb.ListRunsRequest) -> pb.ListRunsResponse:
    """Runs, newest first; the page's token is the id of its last run."""
    query = select(RunRow).where(RunRow.workspace == workspace)
    if request.job_id:
        query = query.where(RunRow.job_id == request.job_id)
    if request.page_token:
        query = query.where(RunRow.id < request.page_token)
    size = page_size(request.page_size, default=DEFAULT_PAGE, most=MAX_PAGE)
    rows = session.exec(query.order_by(col(RunRow.id).desc()).limit(size + 1)).all()
    response = pb.ListRunsResponse()
    for row in rows[:size]:
        response.runs.append(message(row))
        if response.ByteSize() > _MAX_PAGE_BYTES:
            break
    if len(response.runs) < len(rows):
        response.next_page_token = response.runs[-1].id
    return response


def jobs(session: Session, request: pb.ListJobsWithRunsRequest) -> pb.ListJobsWithRunsResponse:
    """Jobs that have runs, of all workspaces; the page's token is the last one's workspace and id."""
    workspace, _, job_id = decode_token(request.page_token).partition("/")
    key = tuple_(col(RunRow.workspace), col(RunRow.job_id))
    database_id = func.max(RunRow.database_id)
    size = page_size(request.page_size, default=_JOBS_PAGE, most=_JOBS_PAGE)
    query = select(RunRow.workspace, RunRow.job_id, database_id).where(
        col(RunRow.job_id) != "", col(RunRow.database_id) != "", key > tuple_(workspace, job_id)
    )
    rows = session.exec(query.group_by(*key).order_by(*key).limit(size)).all()
    response = pb.ListJobsWithRunsResponse(
        jobs=[pb.ListJobsWithRunsResponse.Job(workspace=row[0], id=row[1], database_id=row[2]) for row in rows]
    )
    if len(rows) == size:
        response.next_page_token = encode_token(f"{rows[-1][0]}/{rows[-1][1]}")
    return response


def remove(session: Session, run_ids: Sequence[str]) -> None:
    """Forgets runs. The fence of their job stays: its zombies are not let in again."""
    for table in (ParamRow, SpecRow, TagRow, UndeliveredRow):
        session.execute(delete(table).where(col(table.run_id).in_(run_ids)))
    session.execute(delete(RunRow).where(col(RunRow.id).in_(run_ids)))


def message(row: RunRow | Row[Any]) -> pb.Run:
    """A run as it travels, from its row or from as many of its columns as a `Run` has."""
    run = pb.Run(
        id=row.id,
        workspace=row.workspace,
        job_id=row.job_id,
        fence=row.fence,
        name=row.name,
        created_ns=row.created_ns,
        params=row.params,
        spec=row.spec if row.spec != "{}" else "",
        tags=json.loads(row.tags) if row.tags != "{}" else None,
        notes=row.notes,
        context=row.context,
    )
    if row.rewind is not None:
        run.rewind.ParseFromString(row.rewind)
    return run


def attempt(row: RunRow) -> Attempt:
    """A run as stitching sees it."""
    if row.rewind is None:
        return Attempt(row.id, row.fence)
    rewind = pb.Rewind.FromString(row.rewind)
    return Attempt(row.id, row.fence, Resume(rewind.checkpoint, _cut(rewind), rewind.fence))


def _cut(rewind: pb.Rewind) -> Cut:
    if not rewind.HasField("elsewhere"):
        return Cut(dict(rewind.cut))
    end = rewind.elsewhere
    return Cut(dict(rewind.cut), Elsewhere(end.step, end.until_ns, tuple(end.ranks)))
