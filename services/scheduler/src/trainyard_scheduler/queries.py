"""Reads of the database."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sqlalchemy
from servicekit.errors import InvalidArgument, NotFound
from servicekit.paging import decode_token, encode_token
from sqlalchemy import ColumnElement
from sqlmodel import Session
from trainyard_protos.v1 import scheduler_pb2

from trainyard_scheduler.domain.states import ENDED
from trainyard_scheduler.references import MAX_LENGTH
from trainyard_scheduler.tables import (
    ARTIFACTS,
    ATTEMPTS,
    DOCUMENTS,
    EVENTS,
    JOBS,
    LABELS,
    TOMBSTONES,
    Attempt,
    Event,
    Job,
)

_TOMBSTONES_PAGE = 200


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs to list; empty fields do not filter."""

    workspace: str
    states: tuple[int, ...] = ()
    queue: str = ""
    name_contains: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    owner_kind: str = ""
    owner_id: str = ""
    include_owned: bool = False
    before_id: str = ""


def find_job(session: Session, job_id: str) -> Job:
    """A job by its id.

    Raises:
        NotFound: it is gone.
    """
    row = session.connection().execute(sqlalchemy.select(JOBS).where(JOBS.c.id == job_id)).first()
    if row is None:
        raise NotFound(f"there is no job '{job_id}'", reason="JobNotFound", hint="it was removed after its TTL")
    return Job.model_construct(**row._mapping)


def known_jobs(session: Session, job_ids: Sequence[str]) -> set[str]:
    """Those of the jobs that exist."""
    return set(session.connection().execute(sqlalchemy.select(JOBS.c.id).where(JOBS.c.id.in_(job_ids))).scalars())


def spec_of(session: Session, job_id: str) -> str:
    """The resolved spec of a job, JSON."""
    return session.connection().scalar(sqlalchemy.select(DOCUMENTS.c.spec).where(DOCUMENTS.c.job_id == job_id)) or ""


def attempts_of(session: Session, job_id: str) -> list[Attempt]:
    """The attempts of a job, the oldest first."""
    rows = session.connection().execute(
        sqlalchemy.select(ATTEMPTS).where(ATTEMPTS.c.job_id == job_id).order_by(ATTEMPTS.c.number)
    )
    return [Attempt.model_construct(**row._mapping) for row in rows]


def list_jobs(session: Session, wanted: JobFilter, limit: int) -> list[Job]:
    """Jobs, newest first.

    Raises:
        InvalidArgument: a part of a name is longer than any name.
    """
    if len(wanted.name_contains) > MAX_LENGTH:
        raise InvalidArgument(
            f"name_contains has {len(wanted.name_contains):,} characters; at most {MAX_LENGTH} are allowed",
            reason="TooLong",
        )
    query = sqlalchemy.select(JOBS).where(*_conditions(wanted)).order_by(JOBS.c.id.desc()).limit(limit)
    return [Job.model_construct(**row._mapping) for row in session.connection().execute(query)]


def _conditions(wanted: JobFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = [JOBS.c.workspace == wanted.workspace]
    if wanted.states:
        conditions.append(JOBS.c.state.in_(wanted.states))
    if wanted.queue:
        conditions.append(JOBS.c.queue == wanted.queue)
    if wanted.name_contains:
        conditions.append(JOBS.c.name.contains(wanted.name_contains, autoescape=True))
    if wanted.before_id:
        conditions.append(JOBS.c.id < wanted.before_id)
    for key, value in wanted.labels.items():
        labelled = sqlalchemy.select(LABELS.c.job_id).where(LABELS.c.key == key, LABELS.c.value == value)
        conditions.append(JOBS.c.id.in_(labelled))
    return conditions + _owner_conditions(wanted)


def _owner_conditions(wanted: JobFilter) -> list[ColumnElement[bool]]:
    if wanted.owner_kind or wanted.owner_id:
        pairs = ((JOBS.c.owner_kind, wanted.owner_kind), (JOBS.c.owner_id, wanted.owner_id))
        return [column == value for column, value in pairs if value]
    return [] if wanted.include_owned else [JOBS.c.owner_kind == ""]


def list_events(session: Session, workspace: str, object_id: str, after_seq: int, limit: int) -> list[Event]:
    """Events after a number, of one object or of all. Those of pools belong to every workspace."""
    query = sqlalchemy.select(EVENTS).where(EVENTS.c.seq > after_seq, EVENTS.c.workspace.in_((workspace, "")))
    if object_id:
        query = query.where(EVENTS.c.object_id == object_id)
    rows = session.connection().execute(query.order_by(EVENTS.c.seq).limit(limit))
    return [Event.model_construct(**row._mapping) for row in rows]


def is_being_removed(session: Session, job_id: str) -> bool:
    """Whether something that a removed job left is still to be removed."""
    left = sqlalchemy.select(TOMBSTONES.c.job_id).where(TOMBSTONES.c.job_id == job_id).limit(1)
    return session.execute(left).first() is not None


def used_artifacts(connection: sqlalchemy.Connection, workspace: str) -> list[str]:
    """References to artifacts that jobs which have not ended name as inputs."""
    waiting = JOBS.join(DOCUMENTS, DOCUMENTS.c.job_id == JOBS.c.id)
    query = (
        sqlalchemy.select(DOCUMENTS.c.spec)
        .select_from(waiting)
        .where(JOBS.c.workspace == workspace, JOBS.c.state.not_in(ENDED), DOCUMENTS.c.spec.contains('"artifact"'))
    )
    found: set[str] = set()
    for spec in connection.execute(query).scalars():
        found.update(each["artifact"] for each in json.loads(spec).get("spec", {}).get("inputs") or ())
    return sorted(found)


def tombstones(
    session: Session, pools: Sequence[str], page_token: str, now_ns: int
) -> scheduler_pb2.ListTombstonesResponse:
    """What is to be removed of jobs that are gone, in these places; a page of it.

    Raises:
        InvalidArgument: the token is not one of a page.
    """
    job_id, _, place = decode_token(page_token).partition("/")
    key = sqlalchemy.tuple_(TOMBSTONES.c.job_id, TOMBSTONES.c.pool)
    query = sqlalchemy.select(TOMBSTONES).where(
        TOMBSTONES.c.pool.in_(pools), TOMBSTONES.c.due_ns <= now_ns, key > sqlalchemy.tuple_(job_id, place)
    )
    rows = session.execute(query.order_by(*key).limit(_TOMBSTONES_PAGE)).all()
    response = scheduler_pb2.ListTombstonesResponse(
        tombstones=[
            scheduler_pb2.Tombstone(
                workspace=row.workspace,
                job_id=row.job_id,
                pool=row.pool,
                **{_listed_in(row.pool): json.loads(row.attempt_ids)},
            )
            for row in rows
        ]
    )
    if len(rows) == _TOMBSTONES_PAGE:
        response.next_page_token = encode_token(f"{rows[-1].job_id}/{rows[-1].pool}")
    return response


def _listed_in(place: str) -> str:
    return "kept_references" if place == ARTIFACTS else "attempt_ids"
