"""From requests to stored jobs, many at a time; each succeeds or fails on its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from servicekit.errors import InvalidArgument, ResourceExhausted, ServiceError
from trainyard.spec.allowed import AllowedPods
from trainyard_protos.v1 import scheduler_pb2

from trainyard_scheduler.documents import require_allowed, resolve
from trainyard_scheduler.index import Index
from trainyard_scheduler.ledger import Ledger
from trainyard_scheduler.settings import Settings
from trainyard_scheduler.tables import Job
from trainyard_scheduler.transitions.submit import Submission, submit

_KEY_MAX = 256


class Accepted(NamedTuple):
    """The job of a request; `created` is false when its key was known."""

    job: Job
    created: bool
    spec: str  # of the request


class Submitter:
    """Checks requests, then stores them in chunks of one transaction each."""

    def __init__(self, ledger: Ledger, index: Index, settings: Settings) -> None:
        self._ledger = ledger
        self._index = index
        self._settings = settings

    async def submit(self, requests: Sequence[scheduler_pb2.SubmitRequest]) -> list[Accepted | ServiceError]:
        """One outcome for each request, in order.

        Raises:
            ResourceExhausted: too many jobs are queued already.
        """
        self.require_room(len(requests))
        # A document may take a while to read: not on the loop that answers everybody.
        pools = self._index.allowed_pods()
        checked = await asyncio.to_thread(lambda: [self._check(request, pools) for request in requests])
        outcomes: list[Accepted | ServiceError] = [entry for entry in checked if isinstance(entry, ServiceError)]
        if len(outcomes) == len(checked):
            return outcomes
        good = [entry for entry in checked if isinstance(entry, Submission)]
        accepted = iter(await self._store(good))
        return [entry if isinstance(entry, ServiceError) else next(accepted) for entry in checked]

    def require_room(self, jobs: int) -> None:
        """Raises:
        ResourceExhausted: so many more do not go into the queue."""
        most = self._settings.max_queued_jobs
        if self._index.queued + jobs > most:
            raise ResourceExhausted(
                f"{self._index.queued} jobs are queued; at most {most} may be",
                reason="QueueFull",
                hint="wait until some have started, or cancel some",
            )

    async def _store(self, submissions: Sequence[Submission]) -> list[Accepted]:
        accepted: list[Accepted] = []
        for start in range(0, len(submissions), self._settings.submit_chunk):
            chunk = submissions[start : start + self._settings.submit_chunk]
            stored = await self._ledger.write(functools.partial(submit, submissions=chunk))
            accepted.extend(
                Accepted(entry.job, entry.created, submission.resolved.spec)
                for entry, submission in zip(stored, chunk, strict=True)
            )
        return accepted

    def _check(
        self, request: scheduler_pb2.SubmitRequest, pools: Mapping[str, AllowedPods | None]
    ) -> Submission | ServiceError:
        try:
            _check_lengths(request)
            document = request.document
            resolved = resolve(document.text, document.filename, request.packed_code, self._settings.max_document_bytes)
            if not request.secrets_checked:  # the admission policy of the cluster checks both
                require_allowed(resolved.kubernetes, document.filename, pools)
        except ServiceError as error:
            return error
        return Submission(
            request.workspace or "default",
            request.idempotency_key,
            request.owner.kind,
            request.owner.id,
            resolved,
            request.secrets_checked,
        )


def _check_lengths(request: scheduler_pb2.SubmitRequest) -> None:
    for field, value in (
        ("idempotency_key", request.idempotency_key),
        ("owner.kind", request.owner.kind),
        ("owner.id", request.owner.id),
    ):
        if len(value) > _KEY_MAX:
            raise InvalidArgument(
                f"{field} has {len(value)} characters; at most {_KEY_MAX} are allowed", reason="TooLong"
            )
