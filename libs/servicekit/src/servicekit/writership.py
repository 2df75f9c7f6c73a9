"""One process writes a database, however many are started on it.

On SQLite the writer holds a lock on a file beside the database; the kernel lets go of it when the process dies.

On PostgreSQL it holds an advisory lock on a connection of its own, which the server lets go of when that connection
ends, and a term: a number that grows whenever the lock is taken. Every transaction that writes first checks the term
and holds it in place until it has ended. So a process that was cut off, lost the lock and does not know of it yet
cannot write a word once another has taken over. The holder says every other second that it is well; one that does not
for LEASE_S, because it hangs or its machine does, is cut off by whoever waits.

A holder whose connection is lost takes the lock again for as long as its term stands. The server may not have noticed
the loss, and still keep the lock for the lost connection: then the holder ends that session of its own. Only a higher
term says that another process has taken over.
"""

from __future__ import annotations

import fcntl
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from servicekit.errors import Unavailable

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy.engine import Connection

logger = logging.getLogger(__name__)

LEASE_S = 10.0
"""How long a holder that says nothing keeps the right to write, when another process wants it."""
HANDOVER_S = 15.0
"""How long a process that does not stand by waits for the one before it to be gone."""
KEEPALIVE = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 11_000}
"""Options of connections that notice within 11 s that the other side is gone without a word, as the server does."""
_RENEW_S = 2.0
_RETRY_S = 0.5
_LOCK = 0x747261696E  # "train": the same in every database, which has one writer
_TABLE = """
CREATE TABLE IF NOT EXISTS writership (
    id integer PRIMARY KEY DEFAULT 1 CHECK (id = 1), service text NOT NULL, term bigint NOT NULL, holder text NOT NULL,
    renewed timestamptz NOT NULL DEFAULT now()
)"""
_CUT_OFF_SILENT = """
SELECT pg_terminate_backend(pid) FROM pg_locks, writership
WHERE locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND (classid::bigint << 32 | objid::bigint) = %s AND renewed < now() - make_interval(secs => %s)"""
_END_SESSION = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE (pid, backend_start) = (%s, %s) AND usename = current_user"""
_MY_SESSION = "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
_CHECK = "SELECT term, pg_current_xact_id()::text FROM writership FOR SHARE"
_RENEW = "UPDATE writership SET renewed = now() WHERE term = %s"


class Writership(Protocol):
    """The right to write a database."""

    def acquire(self) -> None:
        """Waits for it.

        Raises:
            RuntimeError: another process has it, and this one does not stand by for it.
        """

    def check(self, connection: Connection) -> str:
        """Holds it for the length of the transaction on this connection.

        Returns:
            The transaction's number, by which `servicekit.outcomes` finds what became of it; "" where a COMMIT always
            says whether it succeeded.

        Raises:
            Unavailable: NotTheWriter: another process has taken over.
        """

    def release(self) -> None:
        """Lets the next one have it."""


def _taken(name: str, database: str, holder: str) -> RuntimeError:
    return RuntimeError(
        f"another process writes {database} already ({holder}): one {name} service at a time. "
        "End it, or give this one a database of its own"
    )


class FileWritership:
    """For SQLite: a lock on `<database>.lock`."""

    def __init__(self, database: Path, *, name: str) -> None:
        self._database = database
        self._name = name
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        path = self._database.with_name(f"{self._database.name}.lock")
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise _taken(self._name, str(self._database), holder) from None
        file.truncate(0)
        file.write(_myself())
        file.flush()
        self._file = file

    def check(self, connection: Connection) -> str:
        return ""  # nobody can take the lock of a process that lives

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class PostgresWritership:
    """For PostgreSQL: an advisory lock and a term.

    Args:
        address: `postgresql://...`.
        name: of the service.
        standby: whether to wait for as long as another process writes.
        on_superseded: called when another process has taken over.
    """

    def __init__(self, address: str, *, name: str, standby: bool, on_superseded: Callable[[], None]) -> None:
        self._address = address
        self._name = name
        self._standby = standby
        self._on_superseded = on_superseded
        self._term = 0
        self._closing, self._wake = socket.socketpair()
        self._keeper = threading.Thread(target=self._keep, name=f"{name}-writership", daemon=True)
        self._lock: psycopg.Connection | None = None
        self._session: tuple[Any, ...] | None = None  # the server's name of the connection that holds the lock
        self._superseded = False

    def acquire(self) -> None:
        connection = self._connect()
        with _closed_on_error(connection):
            holder = self._prepare(connection)
            if not _try_lock(connection):
                logger.warning("another process writes the database", extra={"service": self._name, "holder": holder})
                self._wait_for_lock(connection, holder)
            self._term = self._next_term(connection)
            self._session = connection.execute(_MY_SESSION).fetchone()
        self._lock = connection
        self._keeper.start()

    def check(self, connection: Connection) -> str:
        term, transaction = connection.exec_driver_sql(_CHECK).one()
        if term != self._term:
            self._supersede()
            raise Unavailable(
                f"{self._name}: another process has taken over this database",
                reason="NotTheWriter",
                hint="nothing was stored; call again, which reaches the process that writes now",
            )
        return str(transaction)

    def release(self) -> None:
        if self._keeper.is_alive():
            self._wake.send(b"x")
            self._keeper.join()
        for each in (self._lock, self._closing, self._wake):
            if each is not None:
                each.close()

    def _connect(self) -> psycopg.Connection:
        import psycopg

        # A holder whose machine is gone must not keep the lock for hours.
        keepalive = "-c tcp_keepalives_idle=5 -c tcp_keepalives_interval=2 -c tcp_keepalives_count=3"
        return psycopg.connect(
            self._address,
            autocommit=True,
            connect_timeout=5,
            options=f"{keepalive} -c statement_timeout=0",
            **cast(Any, KEEPALIVE),
        )

    def _prepare(self, connection: psycopg.Connection) -> str:
        """Makes the table; returns who held the writership last."""
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK + 1,))
            connection.execute(_TABLE)
            insert = "INSERT INTO writership (service, term, holder) VALUES (%s, 0, 'nobody') ON CONFLICT DO NOTHING"
            connection.execute(insert, (self._name,))
        row = connection.execute("SELECT service, holder FROM writership").fetchone()
        assert row is not None
        if row[0] != self._name:
            raise RuntimeError(f"this database belongs to the {row[0]} service: give {self._name} one of its own")
        return str(row[1])

    def _wait_for_lock(self, connection: psycopg.Connection, holder: str) -> None:
        import psycopg

        give_up = time.monotonic() + HANDOVER_S
        connection.execute("SELECT set_config('lock_timeout', %s, false)", (f"{_RENEW_S * 1000:.0f}ms",))
        while True:
            try:
                connection.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
                return
            except psycopg.errors.LockNotAvailable:
                if not self._standby and time.monotonic() > give_up:
                    raise _taken(self._name, f"database {connection.info.dbname}", holder) from None
            connection.execute(_CUT_OFF_SILENT, (_LOCK, LEASE_S))

    def _next_term(self, connection: psycopg.Connection) -> int:
        update = "UPDATE writership SET term = term + 1, holder = %s, renewed = now() RETURNING term"
        row = connection.execute(update, (_myself(),)).fetchone()
        assert row is not None
        return int(row[0])

    def _keep(self) -> None:
        """Says that it is well; takes the lock again when its connection ended, unless somebody else did."""
        while self._lock is not None:
            ready = _readable([self._lock.fileno(), self._closing.fileno()], _RENEW_S)
            if self._closing.fileno() in ready:
                return
            if ready or not self._renew(self._lock):
                self._lock.close()
                self._lock = self._take_again()

    def _renew(self, connection: psycopg.Connection) -> bool:
        """Whether the connection is there."""
        import psycopg

        try:
            connection.execute(_RENEW, (self._term,))
        except psycopg.Error:
            return False
        return True

    def _take_again(self) -> psycopg.Connection | None:
        """The lock on a new connection; None when another process has taken over, or this one ends."""
        import psycopg

        logger.warning("the connection that holds the writership is lost", extra={"service": self._name})
        while True:
            try:
                connection = self._connect()
                with _closed_on_error(connection):
                    locked = self._lock_again(connection)
                    # The term is read last: nobody can raise it while the lock is held here.
                    ours = connection.execute("SELECT term FROM writership").fetchone() == (self._term,)
                if ours and locked:
                    return connection
                connection.close()
                if not ours:
                    self._supersede()
                    return None
            except psycopg.Error:
                pass  # the database is away
            if _readable([self._closing.fileno()], _RETRY_S):
                return None

    def _lock_again(self, connection: psycopg.Connection) -> bool:
        """Whether the lock is taken. Who else may hold it: a session of this process that is lost and does not end."""
        if self._session is not None:
            connection.execute(_END_SESSION, self._session)
        if not _try_lock(connection):
            return False
        self._session = connection.execute(_MY_SESSION).fetchone()
        return True

    def _supersede(self) -> None:
        if not self._superseded:
            self._superseded = True
            logger.error("another process has taken over the database", extra={"service": self._name})
            self._on_superseded()


@contextmanager
def _closed_on_error(connection: psycopg.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _readable(descriptors: Iterable[int], timeout_s: float) -> set[int]:
    """Those that can be read, or are closed by the other side. `select` knows no descriptor above 1023."""
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        return {key.fd for key, _ in selector.select(timeout_s)}


def _try_lock(connection: psycopg.Connection) -> bool:
    return connection.execute("SELECT pg_try_advisory_lock(%s)", (_LOCK,)).fetchone() == (True,)


def _myself() -> str:
    return f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"
