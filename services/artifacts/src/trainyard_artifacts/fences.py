"""The highest fence seen of every job: whoever comes with a lower one is a zombie, and so is an attempt that is over.

A fence is seen as soon as an attempt calls anything here, so a new attempt shuts out the old ones by looking for its
checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from servicekit.auth import Principal
from servicekit.errors import attempt_ended, stale_fence
from servicekit.store import Store
from sqlmodel import Session

from trainyard_artifacts.tables import FenceRow

_REMEMBERED = 10_000


class Fence(NamedTuple):
    """Of a job.

    Attributes:
        highest: that was seen.
        closed: the highest of an attempt that is over; -1 for none.
    """

    highest: int
    closed: int


class Fences:
    """Remembers fences in the store; keeps the recent ones at hand, so that a known fence costs no write."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[tuple[str, str], Fence] = OrderedDict()

    async def observe(self, principal: Principal) -> None:
        """Takes note of the fence of an attempt that calls.

        Raises:
            FailedPrecondition: AttemptEnded.
        """
        if principal.kind != "attempt":
            return
        key = (principal.workspace, principal.job_id)
        known = self._known.get(key)
        if known is None or known.highest < principal.fence:
            known = await self._remember(key, lambda session: _raise(session, *key, principal.fence))
        if principal.fence <= known.closed:
            raise attempt_ended(principal.job_id, principal.fence)

    async def close(
        self, workspace: str, job_id: str, fence: int, before: Callable[[Session], None] | None = None
    ) -> None:
        """The attempt with this fence is over, and so are all before it: they store nothing more.

        Args:
            before: what it does last, in the same transaction; not if it is closed already, or a later one is known.
        """

        def change(session: Session) -> Fence:
            known = _raise(session, workspace, job_id, fence)
            if before is not None and known.closed < fence == known.highest:
                before(session)
            return _raise(session, workspace, job_id, fence, fence)

        await self._remember((workspace, job_id), change)

    async def _remember(self, key: tuple[str, str], change: Callable[[Session], Fence]) -> Fence:
        found = await self._store.write(change)
        self._known[key] = found
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return found


def check(session: Session, workspace: str, job_id: str, fence: int) -> None:
    """Refuses a fence lower than the highest seen, or of an attempt that is over; else takes note of it.

    To be called in the transaction that uses it.

    Raises:
        FailedPrecondition: StaleFence, AttemptEnded.
    """
    found = _raise(session, workspace, job_id, fence)
    if fence < found.highest:
        raise stale_fence(job_id, fence, found.highest)
    if fence <= found.closed:
        raise attempt_ended(job_id, fence)


def is_open(session: Session, workspace: str, job_id: str, fence: int) -> bool:
    """Whether the attempt with this fence is not known to be over."""
    row = session.get(FenceRow, (workspace, job_id))
    return row is None or row.closed < fence


def _raise(session: Session, workspace: str, job_id: str, fence: int, closed: int = -1) -> Fence:
    row = session.get(FenceRow, (workspace, job_id))
    if row is None:
        row = FenceRow(workspace=workspace, job_id=job_id, fence=fence)
    row.fence, row.closed = max(row.fence, fence), max(row.closed, closed)
    session.add(row)
    return Fence(row.fence, row.closed)
