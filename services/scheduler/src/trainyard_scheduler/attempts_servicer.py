"""AttemptService: what launchers call."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Coroutine, Iterable, Sized
from typing import Any, TypeVar

import grpc
import sqlalchemy
from servicekit.auth import require_user
from servicekit.errors import Internal, InvalidArgument, ResourceExhausted, ServiceError
from servicekit.store import Store
from sqlmodel import Session
from trainyard_protos.v1 import scheduler_pb2, scheduler_pb2_grpc

from trainyard_scheduler import queries, views
from trainyard_scheduler.combining import Combiner
from trainyard_scheduler.domain.states import AttemptState
from trainyard_scheduler.index import Index
from trainyard_scheduler.ledger import Ledger
from trainyard_scheduler.offers import read_offer
from trainyard_scheduler.settings import Settings
from trainyard_scheduler.tables import ARTIFACTS, ATTEMPTS, JOBS
from trainyard_scheduler.transitions import pools, tombstones
from trainyard_scheduler.transitions.claim import claim
from trainyard_scheduler.transitions.report import report

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LEASE_MAX_S = 3600.0
_BATCH_MAX = 200
_ANSWER_BYTES = 8 * 1024 * 1024
_ID = re.compile(r"[0-9A-Za-z-]{1,64}")

_Assigned = scheduler_pb2.ListAssignedResponse.Assigned
_Context = grpc.aio.ServicerContext[Any, Any]


class AttemptServicer(scheduler_pb2_grpc.AttemptServiceServicer):
    """Turns calls into transitions."""

    def __init__(self, store: Store, ledger: Ledger, index: Index, settings: Settings) -> None:
        self._store = store
        self._ledger = ledger
        self._combiner = Combiner(ledger)
        self._index = index
        self._settings = settings

    async def RegisterPool(
        self, request: scheduler_pb2.RegisterPoolRequest, context: _Context
    ) -> scheduler_pb2.RegisterPoolResponse:
        require_user()
        _require(request.pool, "pool")
        _require(request.launcher_id, "launcher_id")
        _require_lease(request.lease_s)
        offer = read_offer(request)
        live = self._index.pools.get(request.pool)
        said = (True, request.launcher_id, offer, request.lease_s)
        if live is not None and (live.alive, live.launcher_id, live.offer, live.lease_s) == said:
            self._index.renew(request.pool)  # a lease is a heartbeat: it lives in memory
        else:
            await self._ledger.write(functools.partial(pools.register, request=request, offer=offer))
        return scheduler_pb2.RegisterPoolResponse(renew_after_s=request.lease_s / 3)

    async def ClaimAttempt(
        self, request: scheduler_pb2.ClaimAttemptRequest, context: _Context
    ) -> scheduler_pb2.ClaimAttemptResponse:
        require_user()
        return await self._claim(request)

    async def ClaimAttempts(
        self, request: scheduler_pb2.ClaimAttemptsRequest, context: _Context
    ) -> scheduler_pb2.ClaimAttemptsResponse:
        require_user()
        _require_few(request.requests)
        response = scheduler_pb2.ClaimAttemptsResponse()
        room = _ANSWER_BYTES
        for outcome in await _each(self._claim(entry) for entry in request.requests):
            if not isinstance(outcome, ServiceError):
                room -= outcome.ByteSize()
                if room > 0 or not response.results:
                    response.results.add(answer=outcome)
                    continue
                # A claim may be repeated, and is then answered the same.
                outcome = ResourceExhausted("the specs of these attempts are too large for one answer", reason="Full")
            response.results.add(code=outcome.code.value[0], message=outcome.message)
        return response

    async def _claim(self, request: scheduler_pb2.ClaimAttemptRequest) -> scheduler_pb2.ClaimAttemptResponse:
        _require(request.launcher_id, "launcher_id")
        claimed = await self._combiner.write(
            request.attempt_id,
            functools.partial(
                claim, attempt_id=request.attempt_id, fence=request.fence, launcher_id=request.launcher_id
            ),
        )
        if claimed.job is None or claimed.attempt is None:
            return scheduler_pb2.ClaimAttemptResponse(stale=True, stale_reason=claimed.stale)
        return scheduler_pb2.ClaimAttemptResponse(
            assignment=views.assignment(claimed.job, claimed.attempt, claimed.spec, self._index.database_id)
        )

    async def ReportAttempt(
        self, request: scheduler_pb2.ReportAttemptRequest, context: _Context
    ) -> scheduler_pb2.ReportAttemptResponse:
        require_user()
        return await self._report(request)

    async def ReportAttempts(
        self, request: scheduler_pb2.ReportAttemptsRequest, context: _Context
    ) -> scheduler_pb2.ReportAttemptsResponse:
        require_user()
        _require_few(request.requests)
        response = scheduler_pb2.ReportAttemptsResponse()
        for outcome in await _each(self._report(entry) for entry in request.requests):
            if isinstance(outcome, ServiceError):
                response.results.add(code=outcome.code.value[0], message=outcome.message)
            else:
                response.results.add(answer=outcome)
        return response

    async def _report(self, request: scheduler_pb2.ReportAttemptRequest) -> scheduler_pb2.ReportAttemptResponse:
        _require(request.launcher_id, "launcher_id")
        answer = await self._combiner.write(
            request.attempt_id,
            functools.partial(report, request=request, finalize_timeout_s=self._settings.finalize_timeout_s),
        )
        return scheduler_pb2.ReportAttemptResponse(stale=answer.stale, stop=answer.stop)

    async def ListAssigned(
        self, request: scheduler_pb2.ListAssignedRequest, context: _Context
    ) -> scheduler_pb2.ListAssignedResponse:
        require_user()
        attempts = await self._store.read(lambda session: _assigned(session, request.pool, request.launcher_id))
        return scheduler_pb2.ListAssignedResponse(attempts=attempts)

    async def ListTombstones(
        self, request: scheduler_pb2.ListTombstonesRequest, context: _Context
    ) -> scheduler_pb2.ListTombstonesResponse:
        require_user()
        _require(request.pool, "pool")
        places = [request.pool, "", *([ARTIFACTS] if request.artifacts else [])]
        return await self._store.read(
            lambda session: queries.tombstones(session, places, request.page_token, self._index.clock.past_ns())
        )

    async def ConfirmTombstones(
        self, request: scheduler_pb2.ConfirmTombstonesRequest, context: _Context
    ) -> scheduler_pb2.ConfirmTombstonesResponse:
        require_user()
        _require_few(request.tombstones)
        places = [(tombstone.job_id, tombstone.pool) for tombstone in request.tombstones]
        await self._ledger.write(functools.partial(tombstones.confirm, places=places))
        return scheduler_pb2.ConfirmTombstonesResponse()

    async def ReportHoldings(
        self, request: scheduler_pb2.ReportHoldingsRequest, context: _Context
    ) -> scheduler_pb2.ReportHoldingsResponse:
        require_user()
        _require_few(request.holdings)
        ours = [holding.place for holding in request.holdings if holding.database_id == self._index.database_id]
        _require_ids(each for place in ours for each in (place.job_id, *place.attempt_ids))
        known = await self._store.read(lambda session: queries.known_jobs(session, [each.job_id for each in ours]))
        orphans = [place for place in ours if place.job_id not in known]
        if orphans:
            grace_s = self._settings.orphan_grace_s
            found = await self._ledger.write(functools.partial(tombstones.adopt, orphans=orphans, grace_s=grace_s))
            if found:
                logger.warning(
                    "jobs that this database does not know have folders or runs: they are removed unless it knows "
                    "them again, for instance from a backup",
                    extra={"places": found, "removed_in_s": grace_s},
                )
        return scheduler_pb2.ReportHoldingsResponse(unknown=len(orphans))


async def _each(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T | ServiceError]:
    """The outcome of every call; a defect in one is no reason to refuse the others."""
    outcomes: list[T | ServiceError] = []
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, ServiceError):
            logger.error("unexpected error in one of several calls", exc_info=outcome)
            outcomes.append(Internal(f"{type(outcome).__name__}", reason="Internal"))
        else:
            outcomes.append(outcome)
    return outcomes


def _assigned(session: Session, pool: str, launcher_id: str) -> list[_Assigned]:
    mine = (ATTEMPTS.c.pool == pool) & (ATTEMPTS.c.launcher_id == launcher_id)
    columns = (
        ATTEMPTS.c.id.label("attempt_id"),
        ATTEMPTS.c.number.label("fence"),
        ATTEMPTS.c.state,
        (ATTEMPTS.c.stop_reason != "").label("stopping"),
        ATTEMPTS.c.job_id,
        JOBS.c.workspace,
    )
    chosen = sqlalchemy.select(*columns).join(JOBS, JOBS.c.id == ATTEMPTS.c.job_id)
    rows = session.connection().execute(chosen.where(ATTEMPTS.c.state != AttemptState.ENDED, mine))
    return [_Assigned(**row._mapping) for row in rows]


def _require_lease(lease_s: float) -> None:
    if not 0 < lease_s <= _LEASE_MAX_S:
        raise InvalidArgument(
            f"lease_s is {lease_s:g}; allowed: more than 0, at most {_LEASE_MAX_S:g}", reason="InvalidLease"
        )


def _require_ids(values: Iterable[str]) -> None:
    """Folders that launchers remove are named by them."""
    for value in values:
        if not _ID.fullmatch(value):
            raise InvalidArgument(
                f"'{value[:64]}' is not the id of a job or attempt",
                reason="BadId",
                hint="use 1 to 64 of a-z, A-Z, 0-9 and '-'",
            )


def _require_few(requests: Sized) -> None:
    if len(requests) > _BATCH_MAX:
        raise InvalidArgument(
            f"a batch of {len(requests)}; at most {_BATCH_MAX} are allowed",
            reason="BatchTooLarge",
            hint="send several batches",
        )


def _require(value: str, field: str) -> None:
    if not value:
        raise InvalidArgument(f"{field} is empty", reason="MissingField", fields={"field": field})
