"""The highest fence seen of every job: whoever comes with a lower one is a zombie.

A fence is seen as soon as an attempt calls anything here, so a new attempt shuts out the old ones by looking for its
checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict

from servicekit.auth import Principal
from servicekit.errors import stale_fence
from servicekit.store import Store
from sqlmodel import Session

from trainyard_artifacts.tables import FenceRow

_REMEMBERED = 10_000


class Fences:
    """Remembers fences in the store; keeps the recent ones at hand, so that a known fence costs no write."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[tuple[str, str], int] = OrderedDict()

    async def observe(self, principal: Principal) -> None:
        """Takes note of the fence of an attempt that calls."""
        if principal.kind != "attempt":
            return
        key = (principal.workspace, principal.job_id)
        if self._known.get(key, -1) >= principal.fence:
            return
        highest = await self._store.write(lambda session: _raise(session, *key, principal.fence))
        self._known[key] = highest
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)


def check(session: Session, workspace: str, job_id: str, fence: int) -> None:
    """Refuses a fence lower than the highest seen, else takes note of it. To be called in the transaction that uses it.

    Raises:
        FailedPrecondition: StaleFence.
    """
    highest = _raise(session, workspace, job_id, fence)
    if fence < highest:
        raise stale_fence(job_id, fence, highest)


def _raise(session: Session, workspace: str, job_id: str, fence: int) -> int:
    row = session.get(FenceRow, (workspace, job_id))
    if row is None:
        row = FenceRow(workspace=workspace, job_id=job_id, fence=fence)
    row.fence = max(row.fence, fence)
    session.add(row)
    return row.fence
