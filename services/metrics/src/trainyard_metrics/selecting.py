"""Which runs a question about series is about."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import translate

from servicekit.errors import InvalidArgument
from servicekit.store import Store
from sqlmodel import Session, col, select
from trainyard_protos.v1 import metrics_pb2 as pb

from trainyard_metrics import runs
from trainyard_metrics.access import check_run_id, require_reader
from trainyard_metrics.domain.stitch import Attempt
from trainyard_metrics.runs import Facts
from trainyard_metrics.tables import RunRow

_MAX_PATTERNS = 1000
_MAX_PATTERN = 256
_MAX_GLOBS = 4096  # characters; compiling more would hold up everybody else


@dataclass(frozen=True, slots=True)
class Selection:
    """Runs of a job, or one run.

    Attributes:
        attempts: what the points are read from.
        summarised: the run whose summary tells of exactly these points; None when no summary does.
        stitched: whether what a rewind hid is left out.
        names: whether a series is asked for.
    """

    attempts: Sequence[Attempt]
    summarised: Facts | None
    stitched: bool
    names: Callable[[str], bool] | None


async def select_runs(store: Store, selector: pb.SeriesSelector) -> Selection:
    """The runs that a selector means, if its caller may read them.

    Raises:
        InvalidArgument: BadSelector, BadRunId, TooManyNames.
        NotFound: no such run.
        PermissionDenied
    """
    names = name_filter(selector.names)
    if selector.WhichOneof("of") == "run_id":
        run_id = check_run_id(selector.run_id)
        row, first = await store.read(lambda session: _run(session, run_id))
        require_reader(row.workspace, row.job_id)
        return Selection([runs.attempt(row)], runs.facts(row) if first else None, False, names)
    if not selector.job_id:
        raise InvalidArgument("neither a job nor a run", reason="BadSelector", hint="set job_id or run_id")
    workspace = require_reader(selector.workspace, selector.job_id)
    rows = await store.read(lambda session: runs.of_job(session, workspace, selector.job_id))
    alone = len(rows) == 1
    newest = runs.facts(rows[-1]) if rows and (alone or not selector.include_hidden) else None
    return Selection([runs.attempt(row) for row in rows], newest, not selector.include_hidden, names)


def name_filter(patterns: Sequence[str]) -> Callable[[str], bool] | None:
    """Whether a name is one of some names or globs; None for no patterns: all.

    Raises:
        InvalidArgument: TooManyNames.
    """
    # Patterns are compiled into one expression, which takes time and memory that grow with them.
    if len(patterns) > _MAX_PATTERNS or any(len(pattern) > _MAX_PATTERN for pattern in patterns):
        raise InvalidArgument(
            f"{len(patterns):,} patterns of names",
            reason="TooManyNames",
            hint=f"give at most {_MAX_PATTERNS:,} of at most {_MAX_PATTERN} characters; '*' stands for any text",
        )
    if not patterns:
        return None
    exact = frozenset(patterns)
    globs = [pattern for pattern in exact if any(character in pattern for character in "*?[")]
    if not globs:
        return exact.__contains__
    if sum(map(len, globs)) > _MAX_GLOBS:
        raise InvalidArgument(
            f"{len(globs):,} patterns with '*', '?' or '['",
            reason="TooManyNames",
            hint=f"use at most {_MAX_GLOBS:,} characters of them, or exact names",
        )
    expression = re.compile("|".join(map(translate, globs)), re.DOTALL)
    return lambda name: name in exact or expression.fullmatch(name) is not None


def _run(session: Session, run_id: str) -> tuple[RunRow, bool]:
    """A run, and whether it is its job's first."""
    row = runs.find(session, run_id)
    earlier = select(RunRow.id).where(
        col(RunRow.workspace) == row.workspace, col(RunRow.job_id) == row.job_id, col(RunRow.fence) < row.fence
    )
    return row, not row.job_id or session.exec(earlier.limit(1)).first() is None
