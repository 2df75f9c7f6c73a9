"""What became of a transaction whose COMMIT was not answered: PostgreSQL is asked, by the transaction's number.

A connection that breaks while COMMIT is on its way says nothing about the transaction: it may be stored or not. The
server keeps the outcome of every transaction under its number, which the writer learns with its first statement.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import sqlalchemy

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine


class Outcome(StrEnum):
    """Of a transaction."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    IN_PROGRESS = "in progress"  # the server still works on it, or recovers
    UNREACHABLE = "unreachable"
    FORGOTTEN = "forgotten"  # this server knows no such transaction: it is not the one that was written


_STATUS = sqlalchemy.text(
    "SELECT CASE WHEN pg_is_in_recovery() THEN 'in progress' ELSE pg_xact_status(CAST(:number AS xid8)) END"
)
# Whoever waits there for the next statement waits for a connection that is gone. A COMMIT at work is left to end.
_END_ABANDONED = sqlalchemy.text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE backend_xid = CAST(CAST(:number AS xid8) AS xid) AND state LIKE 'idle in transaction%'"
)


def look_up(engine: Engine, number: str) -> Outcome:
    """What became of a transaction whose connection is lost. One that never received its COMMIT is ended.

    Args:
        engine: of the PostgreSQL database.
        number: the transaction's `pg_current_xact_id()`.
    """
    try:
        with engine.connect() as raw:
            return _ask(raw.execution_options(isolation_level="AUTOCOMMIT"), number)
    except sqlalchemy.exc.DataError:
        return Outcome.FORGOTTEN  # the number is in this server's future
    except sqlalchemy.exc.SQLAlchemyError:
        return Outcome.UNREACHABLE


def _ask(connection: Connection, number: str) -> Outcome:
    status = connection.execute(_STATUS, {"number": number}).scalar()
    if status is None:
        return Outcome.FORGOTTEN  # so old that its outcome was cleared away
    outcome = Outcome(status)
    if outcome is Outcome.IN_PROGRESS:
        connection.execute(_END_ABANDONED, {"number": number})
    return outcome
