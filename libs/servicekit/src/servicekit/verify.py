"""What every service's `Verify` method begins with: is its database there, and sound?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import sqlalchemy
from sqlmodel import Session
from trainyard_protos.v1.admin_pb2 import VerifyResponse

from servicekit import presence
from servicekit.events import AdminEvent, Recorder, Subject
from servicekit.store import Store

Finding = VerifyResponse.Finding

_FROM_A_BACKUP = "stop the service, put the database back from a backup, and start it again"


async def database_findings(store: Store, *, acknowledge: Callable[[str], Awaitable[None]] | None) -> list[Finding]:
    """What is wrong with the database itself. PostgreSQL looks after its own files.

    Args:
        acknowledge: for a repair: notes that what a missing database held is lost, and records what it is given. The
            loss is reported once more, and then no longer.
    """
    if store.presence is None:
        return []
    if is_gone(store):
        what = f"the database {store.file} was removed or replaced while the service has it open"
        return [Finding(what=what, hint=_FROM_A_BACKUP, lost="everything that is written from now on")]
    if damage := await _damage(store):
        return [Finding(what=f"the database {store.file} is damaged: {what}", hint=_FROM_A_BACKUP) for what in damage]
    when = await store.read(presence.missing_at)
    if not when:
        return []
    what = f"the database {store.file} was missing at the start of {when}, and was made anew, empty"
    if acknowledge is not None:
        await acknowledge(what)
    return [
        Finding(
            what=what,
            hint="" if acknowledge is not None else f"{_FROM_A_BACKUP}; repair goes on without what it held",
            lost="everything that it held until then",
            repaired=acknowledge is not None,
        )
    ]


async def acknowledge_loss(store: Store, recorder: Recorder, about: Subject, what: str) -> None:
    """Notes that an operator knows of a missing database, and records it."""

    def change(session: Session) -> None:
        presence.acknowledge(session.connection())
        recorder.record(session, AdminEvent.REPAIRED, about, what)

    await store.write(change)


def is_gone(store: Store) -> bool:
    """Whether the open database is in no folder any more, so that nothing else can be checked against it."""
    return store.presence is not None and store.presence.gone


async def knows_everything(store: Store) -> bool:
    """Whether what the database does not know is superfluous, and not what a lost database knew."""
    if store.presence is None:
        return True
    return not is_gone(store) and not await store.read(presence.missing_at)


async def _damage(store: Store) -> list[str]:
    def check(session: Session) -> list[str]:
        rows = session.connection().exec_driver_sql("PRAGMA quick_check(10)").scalars()
        return [row for row in rows if row != "ok"]

    try:
        return await store.read(check)
    except sqlalchemy.exc.DatabaseError as error:
        return [str(error.orig)]
