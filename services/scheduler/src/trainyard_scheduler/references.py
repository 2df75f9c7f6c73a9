"""Which job a user means: the one place that resolves what commands and clients accept in place of a job's id.

018f4c2e-...   an id, or a prefix of one that fits no other job
digits         a name: the newest job of that name; for a cancel the only one that has not ended; for a removal the name
               has to be that of one job
digits#7       the 7th job of that name
@last, @-2     the newest job, and the second newest (jobs of studies and pipelines do not count)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import sqlalchemy
from servicekit.errors import FailedPrecondition, InvalidArgument, NotFound
from sqlmodel import Session

from trainyard_scheduler.domain.states import ENDED, JobState
from trainyard_scheduler.tables import JOBS

MAX_LENGTH = 256
LAST = "@last"
_FORMS = "use an id, a name, name#7 (the 7th job of that name), @last or @-2 (the second newest)"
_RELATIVE = re.compile(r"@-([1-9][0-9]{0,8})")
_NUMBERED = re.compile(r"([^#]+)#([1-9][0-9]{0,17})")
_NAMES_COMPARED = 1000
_SHOWN = 5

_Found = sqlalchemy.Row[Any]


def resolve_job_id(
    session: Session, workspace: str, reference: str, *, live: bool = False, single: bool = False
) -> str:
    """Returns the id of the job that a reference selects.

    Args:
        live: a name selects the only job of that name that has not ended, as a cancel needs it; the newest one when
            all have ended.
        single: a name selects the only job of that name, as a removal needs it.

    Raises:
        NotFound: no job matches; the hint has the nearest names.
        FailedPrecondition: AmbiguousJob: several jobs match.
        InvalidArgument: no reference has this form.
    """
    if len(reference) > MAX_LENGTH:
        raise InvalidArgument(
            f"a job's id or name has {len(reference):,} characters; at most {MAX_LENGTH} are allowed", reason="TooLong"
        )
    if reference.startswith("@"):
        return _by_age(session, workspace, reference)
    if "#" in reference:
        return _by_number(session, workspace, reference)
    if not reference:
        raise _not_found(session, workspace, reference)
    here = _jobs(workspace)
    found = session.execute(here.where(JOBS.c.id == reference)).first() or _by_name(
        session, workspace, reference, live, single
    )
    if found is None:
        matching = session.execute(here.where(JOBS.c.id.startswith(reference, autoescape=True))).all()
        if len(matching) > 1:
            raise _ambiguous(reference, matching)
        found = matching[0] if matching else None
    if found is None:
        raise _not_found(session, workspace, reference)
    return str(found.id)


def _jobs(workspace: str) -> sqlalchemy.Select[Any]:
    """Jobs of a workspace, newest first, one more than a message shows."""
    columns = JOBS.c.id, JOBS.c.name, JOBS.c.number, JOBS.c.state
    newest_first = sqlalchemy.select(*columns).where(JOBS.c.workspace == workspace).order_by(JOBS.c.id.desc())
    return newest_first.limit(_SHOWN + 1)


def _by_age(session: Session, workspace: str, reference: str) -> str:
    relative = _RELATIVE.fullmatch(reference)
    if relative is None and reference != LAST:
        raise InvalidArgument(f"'{reference}' is not a reference to a job", reason="BadReference", hint=_FORMS)
    age = int(relative[1]) if relative else 1
    unowned = _jobs(workspace).where(JOBS.c.owner_kind == "")
    found = session.execute(unowned.limit(1).offset(age - 1)).first()
    if found is not None:
        return str(found.id)
    if age == 1:
        raise NotFound("there is no job yet", reason="JobNotFound", hint="yard run JOB.yaml starts one")
    raise NotFound(f"there are fewer than {age} jobs", reason="JobNotFound", hint="'yard jobs' lists them")


def _by_number(session: Session, workspace: str, reference: str) -> str:
    numbered = _NUMBERED.fullmatch(reference)
    if numbered is None:
        raise InvalidArgument(f"'{reference}' is not a reference to a job", reason="BadReference", hint=_FORMS)
    name, number = numbered[1], int(numbered[2])
    of_name = _jobs(workspace).where(JOBS.c.name == name)
    found = session.execute(of_name.where(JOBS.c.number == number)).first()
    if found is not None:
        return str(found.id)
    newest = session.execute(of_name).first()
    if newest is None:
        raise _not_found(session, workspace, name)
    raise NotFound(
        f"there is no job '{reference}'",
        reason="JobNotFound",
        hint=f"the newest job of that name is {name}#{newest.number}; 'yard jobs --name {name}' lists them",
    )


def _by_name(session: Session, workspace: str, name: str, live: bool, single: bool) -> _Found | None:
    of_name = _jobs(workspace).where(JOBS.c.name == name)
    if single and len(found := session.execute(of_name).all()) > 1:
        raise _ambiguous(name, found)
    if live:
        running = session.execute(of_name.where(JOBS.c.state.not_in(ENDED))).all()
        if len(running) > 1:
            raise _ambiguous(name, running)
        if running:
            return running[0]
    return session.execute(of_name).first()


def _ambiguous(reference: str, found: Sequence[_Found]) -> FailedPrecondition:
    shown = found[:_SHOWN]
    jobs = ", ".join(f"{row.name}#{row.number} ({row.id}, {JobState(row.state).name.lower()})" for row in shown)
    more = " and more" if len(found) > _SHOWN else ""
    return FailedPrecondition(
        f"'{reference}' matches several jobs: {jobs}{more}",
        reason="AmbiguousJob",
        hint=f"select one of them, for instance {shown[0].name}#{shown[0].number}",
        fields={"ids": ",".join(row.id for row in shown)},
    )


def _not_found(session: Session, workspace: str, reference: str) -> NotFound:
    newest = sqlalchemy.select(JOBS.c.name).where(JOBS.c.workspace == workspace).order_by(JOBS.c.id.desc())
    names = set(session.execute(newest.limit(_NAMES_COMPARED)).scalars())
    near = difflib.get_close_matches(reference, names, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "'yard jobs' lists them"
    return NotFound(f"there is no job '{reference}'", reason="JobNotFound", hint=hint, fields={"near": ",".join(near)})
