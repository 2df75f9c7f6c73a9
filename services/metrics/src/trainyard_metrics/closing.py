"""The end of an attempt: its token stores nothing more, and what is undelivered comes with a delivery token.

A delivery token writes to the run of its attempt alone, and once the attempt is closed, there to the writers that were
named with that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from weakref import WeakSet

from servicekit.auth import Principal
from servicekit.errors import InvalidArgument, PermissionDenied, attempt_ended
from servicekit.store import Store
from sqlmodel import Session
from trainyard_protos.v1 import metrics_pb2 as pb

from trainyard_metrics.access import check_run_id
from trainyard_metrics.tables import FenceRow, RunRow, UndeliveredRow

MAX_WRITERS = 10_000
_MAX_WRITERS_BYTES = 1024 * 1024
_REMOVED = 2**31 - 1  # higher than the fence of any attempt: the job was removed, and nothing of it is taken any more


class Admission:
    """What one stream may append to one run.

    Args:
        writers: the only ones, and what is below them (`<writer>/...`); None for all.
    """

    def __init__(self, principal: Principal, run_id: str, writers: frozenset[str] | None) -> None:
        self.principal = principal
        self.run_id = run_id
        self.writers = writers
        self.closed = False

    def check(self, writer_id: str) -> None:
        """Refuses a batch of a writer.

        Raises:
            FailedPrecondition: AttemptEnded, since the stream began.
            PermissionDenied: NotGranted.
        """
        if self.closed:
            raise attempt_ended(self.principal.job_id, self.principal.fence)
        if self.writers is not None and not _below(writer_id, self.writers):
            raise _not_granted(f"writer '{writer_id[:100]}' of run {self.run_id}")


class Closings:
    """Closes attempts, also for streams that are open."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._admissions: WeakSet[Admission] = WeakSet()

    async def admit(self, principal: Principal, row: RunRow) -> Admission:
        """Lets a stream write to a run.

        Raises:
            FailedPrecondition: AttemptEnded.
            PermissionDenied: NotGranted.
        """
        admission = Admission(principal, row.id, None)
        self._admissions.add(admission)  # before the look into the database: a closing meanwhile finds it
        admission.writers = await self._store.read(lambda session: admitted(session, principal, row.id))
        return admission

    async def close(self, request: pb.CloseAttemptRequest) -> None:
        """Closes an attempt.

        Raises:
            InvalidArgument: BadAttempt, TooManyWriters.
        """
        _check(request)
        await self._store.write(lambda session: _close(session, request))
        self._close_streams(request.workspace, request.job_id, request.fence)
        for admission in list(self._admissions):
            if admission.run_id == request.attempt_id and admission.principal.kind == "delivery":
                admission.writers = frozenset(request.undelivered_writers)

    def _close_streams(self, workspace: str, job_id: str, fence: int) -> None:
        """Closes the open streams of a job's attempts up to this one."""
        for admission in list(self._admissions):
            of = admission.principal
            if of.kind == "attempt" and (of.workspace, of.job_id) == (workspace, job_id) and of.fence <= fence:
                admission.closed = True


def close_job(session: Session, workspace: str, job_id: str) -> bool:
    """The job was removed: no attempt of it stores anything from now on, and nothing of it is delivered.

    Returns:
        Whether it was not known before.
    """
    before = session.get(FenceRow, (workspace, job_id))
    known = before is not None and before.closed >= _REMOVED
    _raise(session, workspace, job_id, fence=0, closed=_REMOVED)
    return not known


def is_open(session: Session, row: RunRow) -> bool:
    """Whether the attempt that a run is of may still store something."""
    fence = session.get(FenceRow, (row.workspace, row.job_id))
    return fence is None or row.fence > fence.closed


def _below(writer_id: str, writers: frozenset[str]) -> bool:
    while writer_id and writer_id not in writers:
        writer_id = writer_id.rpartition("/")[0]
    return bool(writer_id)


def admitted(session: Session, principal: Principal, run_id: str) -> frozenset[str] | None:
    """The writers a caller may append to a run; None for all.

    Raises:
        FailedPrecondition: AttemptEnded.
        PermissionDenied: NotGranted.
    """
    fence = session.get(FenceRow, (principal.workspace, principal.job_id))
    if fence is None or principal.fence > fence.closed or principal.kind == "user":
        return None
    if principal.kind == "attempt":
        raise attempt_ended(principal.job_id, principal.fence)
    row = session.get(UndeliveredRow, run_id)
    if row is None:
        raise _not_granted(f"run {run_id}")
    return frozenset(json.loads(row.writers))


def _raise(session: Session, workspace: str, job_id: str, fence: int, closed: int) -> bool:
    """Notes the fence of an attempt, and of one that is over; whether the job is still there."""
    row = session.get(FenceRow, (workspace, job_id))
    if row is None:
        row = FenceRow(workspace=workspace, job_id=job_id, fence=fence)
    row.fence, row.closed = max(row.fence, fence), max(row.closed, closed)
    session.add(row)
    return row.closed < _REMOVED


def _close(session: Session, request: pb.CloseAttemptRequest) -> None:
    if not _raise(session, request.workspace, request.job_id, request.fence, request.fence):
        return
    undelivered = session.get(UndeliveredRow, request.attempt_id)
    if request.undelivered_writers:
        undelivered = undelivered or UndeliveredRow(run_id=request.attempt_id, writers="")
        undelivered.writers = json.dumps(sorted(set(request.undelivered_writers)))
        session.add(undelivered)
    elif undelivered is not None:
        session.delete(undelivered)


def _check(request: pb.CloseAttemptRequest) -> None:
    check_run_id(request.attempt_id)
    if not request.job_id or request.fence < 0:
        raise InvalidArgument(
            f"attempt {request.fence} of job '{request.job_id}'",
            reason="BadAttempt",
            hint="give the attempt's job, its id and its fence",
        )
    writers: Sequence[str] = request.undelivered_writers
    if len(writers) > MAX_WRITERS or sum(map(len, writers)) > _MAX_WRITERS_BYTES:
        raise InvalidArgument(
            f"{len(writers):,} undelivered writers",
            reason="TooManyWriters",
            hint=f"at most {MAX_WRITERS:,} with {_MAX_WRITERS_BYTES:,} characters together",
        )


def _not_granted(what: str) -> PermissionDenied:
    return PermissionDenied(
        f"{what}: nothing is to be delivered there",
        reason="NotGranted",
        hint="a delivery token is for the writers that were named when its attempt was closed",
    )
