"""Runs that match a filter, in pages, with the last values of some of their series.

First the ids are found, then the rest of as many runs as fit into an answer is read: no search holds more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from servicekit.errors import InvalidArgument
from servicekit.paging import page_size
from sqlalchemy import Row, and_, literal, select, true
from sqlmodel import Session, col
from trainyard_protos.v1 import metrics_pb2 as pb

from trainyard_metrics.conditions import Clause, Dialect, column
from trainyard_metrics.domain import filters
from trainyard_metrics.domain.columns import Ints
from trainyard_metrics.domain.summary import ENTRY, Packed
from trainyard_metrics.ordering import Order
from trainyard_metrics.runs import DEFAULT_PAGE, MAX_PAGE, message
from trainyard_metrics.tables import RunRow, SummaryRow

MAX_NAMES = 100
_MAX_RUN_IDS = 10_000
_MAX_BYTES = 8 * 1024 * 1024
_AT_ONCE = 250

Found = Row[Any]


def search(session: Session, workspace: str, request: pb.SearchRunsRequest) -> pb.SearchRunsResponse:
    """One page of runs.

    Raises:
        InvalidArgument: BadFilter, BadOrder, BadPageToken, TooManyNames.
    """
    _check(request)
    order = Order(request.order_by)
    size = page_size(request.page_size, default=DEFAULT_PAGE, most=MAX_PAGE)
    found = _find(session, workspace, request, order, size + 1)
    response = pb.SearchRunsResponse()
    room = _MAX_BYTES
    for run in _read(session, [row[0] for row in found[:size]], request):
        room -= run.ByteSize()
        if room < 0 and response.runs:
            break
        response.runs.append(run)
    if len(response.runs) < len(found):
        response.next_page_token = order.token(found[len(response.runs) - 1][1:])
    return response


def _check(request: pb.SearchRunsRequest) -> None:
    if len(request.names) > MAX_NAMES:
        raise InvalidArgument(
            f"last values of {len(request.names):,} series", reason="TooManyNames", hint=f"name at most {MAX_NAMES}"
        )
    if len(request.run_ids) > _MAX_RUN_IDS:
        raise InvalidArgument(
            f"a search among {len(request.run_ids):,} runs", reason="TooManyRuns", hint=f"at most {_MAX_RUN_IDS:,}"
        )


def _find(session: Session, workspace: str, request: pb.SearchRunsRequest, order: Order, limit: int) -> Sequence[Found]:
    """Id and keys of the runs of a page."""
    dialect = Dialect(session.get_bind().dialect.name)
    query, keys = order.apply(select(col(RunRow.id)).select_from(RunRow), dialect)
    query = query.where(_scope(workspace, request))
    if (condition := filters.parse(request.filter)) is not None:
        query = query.where(dialect.where(condition))
    if request.page_token:
        query = query.where(order.behind(request.page_token, keys))
    query = query.add_columns(*(key.expression for key in keys)).order_by(*(key.clause() for key in keys))
    return session.execute(query.limit(limit)).all()


def _scope(workspace: str, request: pb.SearchRunsRequest) -> Clause:
    """Which runs a search is about."""
    of: Clause = column(RunRow.workspace) == workspace
    newest = true() if request.all_attempts else column(RunRow.superseded).is_(False)
    return and_(of, newest, column(RunRow.id).in_(request.run_ids)) if request.run_ids else and_(of, newest)


def _read(session: Session, run_ids: Sequence[str], request: pb.SearchRunsRequest) -> Iterator[pb.FoundRun]:
    values = _Values(request.names) if request.names else None
    for start in range(0, len(run_ids), _AT_ONCE):
        some = run_ids[start : start + _AT_ONCE]
        rows = {row.id: row for row in session.execute(_runs(some, with_context=request.with_context))}
        packed = _packed(session, some) if values else {}
        for run_id in some:
            if run_id in rows:
                row = rows[run_id]
                found = pb.FoundRun(run=message(row), updated_ns=row.updated_ns)
                if values is not None:
                    values.add(found, packed.get(run_id))
                yield found


def _runs(run_ids: Sequence[str], *, with_context: bool) -> Any:
    context = col(RunRow.context) if with_context else literal("").label("context")
    columns = (
        RunRow.id, RunRow.workspace, RunRow.job_id, RunRow.fence, RunRow.name, RunRow.created_ns,
        RunRow.updated_ns, RunRow.params, RunRow.spec, RunRow.tags, RunRow.notes, RunRow.rewind,
    )  # fmt: skip
    return select(*map(col, columns), context).where(col(RunRow.id).in_(run_ids))


def _packed(session: Session, run_ids: Sequence[str]) -> Mapping[str, bytes]:
    query = select(col(SummaryRow.run_id), col(SummaryRow.packed)).where(col(SummaryRow.run_id).in_(run_ids))
    return {row.run_id: row.packed for row in session.execute(query)}


class _Values:
    """Last values of the lowest rank of some names, out of packed summaries.

    Runs that log the same series by the same ranks share where they are, so that is found once for all of them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._places: dict[tuple[bytes, bytes], _Places] = {}

    def add(self, found: pb.FoundRun, data: bytes | None) -> None:
        """Fills in the columns of a run."""
        packed = Packed.of(data) if data else Packed(b"", np.zeros(0, ENTRY))
        key = (packed.table, packed.entries["rank"].tobytes())
        places = self._places.get(key)
        if places is None:
            places = self._places[key] = _find_places(packed, self._names)
        entries = np.empty(len(self._names), ENTRY)
        entries[places.columns] = packed.entries[places.slots]
        entries[places.absent] = _ABSENT
        found.last_value.extend(entries["last_value"].tolist())
        found.last_step.extend(entries["last_step"].tolist())
        found.count.extend(entries["count"].tolist())


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the names of a request are in a summary: those of `columns` in `slots`, those of `absent` nowhere."""

    columns: Ints
    slots: Ints
    absent: Ints


_ABSENT = np.array([(0, 0, 0, 0, np.nan, np.nan, np.nan)], ENTRY)


def _find_places(packed: Packed, names: Sequence[str]) -> _Places:
    slots: dict[str, int] = {}
    rank = packed.entries["rank"]
    for slot, name in enumerate(packed.names()):
        if name not in slots or rank[slot] < rank[slots[name]]:
            slots[name] = slot
    columns = [column for column, name in enumerate(names) if name in slots]
    absent = [column for column, name in enumerate(names) if name not in slots]
    return _Places(_ints(columns), _ints([slots[names[column]] for column in columns]), _ints(absent))


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int64)
