"""A service's database: one writer with group commit, a few readers.

Closures handed to `write` queue up; the writer thread runs all that wait in one transaction, each in a savepoint of its
own, commits once, and only then resolves their futures. Whoever awaits a write has it on disk. One fsync serves all
came together, which is what makes thousands of small writes a second possible on SQLite with `synchronous=FULL`.

The same holds on PostgreSQL, where `servicekit.writership` sees to it that there is one writer. A database that went
away fails the calls of that time and no later ones. When it went away while a commit was on its way, nobody guesses:
the calls of that commit wait until the database says what became of it (`servicekit.outcomes`, decision 0022).
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy
from sqlalchemy import event
from sqlmodel import Session

from servicekit.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, ServiceError, Unavailable
from servicekit.outcomes import Outcome, look_up
from servicekit.presence import Presence
from servicekit.writership import KEEPALIVE, FileWritership, PostgresWritership, Writership

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MAX_WAITING = 20_000
_MAX_GROUP = 256
_ASK_AGAIN_S = 0.2
STATEMENT_TIMEOUT_S = 30
_POSTGRES_OPTIONS = f"-c statement_timeout={STATEMENT_TIMEOUT_S}s -c idle_in_transaction_session_timeout=60s"

_Write = tuple[Callable[[Session], Any], "Future[Any]"]


def _engine(url: str) -> Engine:
    # Errors go to logs and callers: they name statements, never the values in them.
    if not url.startswith("sqlite"):
        connect_args: dict[str, object] = {**KEEPALIVE, "connect_timeout": 5, "options": _POSTGRES_OPTIONS}
        engine = sqlalchemy.create_engine(url, pool_pre_ping=True, hide_parameters=True, connect_args=connect_args)
        event.listen(engine, "handle_error", _hide_details)
        return engine
    engine = sqlalchemy.create_engine(
        url, connect_args={"check_same_thread": False, "timeout": 30}, hide_parameters=True
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=30000"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        mode = "IMMEDIATE" if connection.get_execution_options().get("writer") else "DEFERRED"
        connection.exec_driver_sql(f"BEGIN {mode}")

    return engine


def _reading_engine(file: Path) -> Engine:
    """An engine that cannot write: the file is opened for reading, which SQLite does beside a writer too."""
    engine = sqlalchemy.create_engine(
        f"sqlite:///{file}",
        creator=lambda: sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False),
        hide_parameters=True,
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA busy_timeout=30000")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN DEFERRED")

    return engine


def _hide_details(context: sqlalchemy.engine.ExceptionContext) -> None:
    """PostgreSQL repeats the values of a row that it refuses, in lines after the first."""
    for error in (context.original_exception, context.sqlalchemy_exception):
        if error is not None and error.args:
            error.args = (str(error.args[0]).partition("\nDETAIL:")[0], *error.args[1:])


class Store:
    """The tables of one service.

    Args:
        url: `sqlite:///path` or `postgresql+psycopg://...`.
        migrations: folder with the service's Alembic environment (`versions/`).
        name: of the service, for thread names and errors.
        read_only: a SQLite file is read, next to whoever writes it; nothing is written, not even a schema.
        standby: on PostgreSQL, whether `open` waits for as long as another process writes this database. Without, it
            waits a short while and then refuses; on SQLite it refuses at once.
        on_superseded: called, on some thread, when another process has taken over the database, or when the database
            is no longer the one that was written: this process can write no more. The default asks it to end.
    """

    def __init__(
        self,
        url: str,
        *,
        migrations: Path,
        name: str,
        readers: int = 4,
        read_only: bool = False,
        standby: bool = False,
        on_superseded: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM),
    ) -> None:
        self._url = url
        self.read_only = read_only
        self._standby = standby
        self._on_superseded = on_superseded
        self._writership: Writership | None = None
        self.file = Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None
        """The database's file; None on PostgreSQL."""
        self.presence = Presence(self.file) if self.file is not None else None
        """Whether the file is the one that was written before; None on PostgreSQL."""
        self._migrations = migrations
        self._name = name
        self._engine: Engine | None = None
        self._closed = False
        self._waiting: queue.Queue[_Write | None] = queue.Queue(_MAX_WAITING)
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix=f"{name}-read")
        self._writer = threading.Thread(target=self._write_loop, name=f"{name}-write", daemon=True)

    async def open(self) -> None:
        """Connects, becomes the database's only writer, migrates its schema when its version differs.

        Raises:
            RuntimeError: another process writes it, it belongs to another service, or to a newer release; read-only,
                also: it is missing, or belongs to an earlier release.
            sqlalchemy.exc.OperationalError: it is not reachable.
        """
        await asyncio.get_running_loop().run_in_executor(self._readers, self._open)

    def _open(self) -> None:
        if self.read_only:
            self._connect_to_read()
            return
        self._writership = self._make_writership()
        try:
            self._writership.acquire()
            if self.presence is not None:
                self.presence.before_open()
            self._connect()
            if self.presence is not None:
                self.presence.opened()
            self._writer.start()
        except BaseException:
            self._writership.release()
            raise

    def _connect(self) -> None:
        from servicekit.migrate import upgrade

        self._engine = _engine(self._url)
        upgrade(self._engine, self._migrations)

    def _connect_to_read(self) -> None:
        from servicekit.migrate import require_newest

        if self.file is None or not self.file.exists():
            raise RuntimeError(f"there is no database {self.file or self._name} to read")
        self._engine = _reading_engine(self.file)
        require_newest(self._engine, self._migrations)

    def _make_writership(self) -> Writership:
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            return FileWritership(self.file, name=self._name)
        address = sqlalchemy.make_url(self._url).set(drivername="postgresql").render_as_string(hide_password=False)
        return PostgresWritership(address, name=self._name, standby=self._standby, on_superseded=self._on_superseded)

    @property
    def engine(self) -> Engine:
        """The SQLAlchemy engine, for tools; services use `read` and `write`."""
        if self._engine is None:
            raise RuntimeError(f"the store of {self._name} is not open")
        return self._engine

    async def write(self, change: Callable[[Session], T]) -> T:
        """Runs a change in the writer's transaction; returns its value once it is committed.

        The change must not call other services or wait. When it raises, only its own writes are undone. When the
        database goes away during the commit, this waits until it is known whether the change is stored.

        Raises:
            FailedPrecondition: the store is read-only.
            InvalidArgument: a number or text in it fits into no column.
            ResourceExhausted: too many writes wait already.
            Unavailable: the commit failed (disk full, database gone), or the service stops: nothing of it is stored.
                With the reason OutcomeUnknown: the service ends before the database said whether it is stored.
        """
        self._require_open()
        if self.read_only:
            raise FailedPrecondition(
                f"{self._name} only reads: no yard is running", reason="ReadOnlyYard", hint="start one with 'yard up'"
            )
        future: Future[T] = Future()
        try:
            self._waiting.put_nowait((change, future))
        except queue.Full:
            raise ResourceExhausted(
                f"{self._name}: {_MAX_WAITING} writes wait already",
                reason="WriteQueueFull",
                hint="try again in a few seconds",
            ) from None
        return await asyncio.wrap_future(future)

    async def read(self, query: Callable[[Session], T]) -> T:
        """Runs a query on a reader thread, in a transaction that sees everything committed before it.

        Raises:
            InvalidArgument: it compares with a number or text that no column can hold.
            Unavailable: the database does not answer, or the service stops.
        """
        self._require_open()

        def run() -> T:
            try:
                with Session(self.engine) as session:
                    return query(session)
            except _UNSTORABLE as error:
                raise _unstorable(self._name) from error
            except _AWAY as error:
                raise _away(self._name, error) from error

        return await asyncio.get_running_loop().run_in_executor(self._readers, run)

    def _require_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self._name} stops", reason="ShuttingDown", hint="call again when the yard is up")

    async def close(self) -> None:
        """Finishes the writes that wait, then disconnects. Who comes later is told so."""
        self._closed = True
        loop = asyncio.get_running_loop()
        if self._writer.is_alive():
            await loop.run_in_executor(None, self._waiting.put, None)
            await loop.run_in_executor(None, self._writer.join)
        self._readers.shutdown(wait=True)
        if self._engine is not None:
            self._engine.dispose()
        if self._writership is not None:
            await loop.run_in_executor(None, self._writership.release)

    def _write_loop(self) -> None:
        while True:
            group = self._take_group()
            if group:
                self._commit(group)
            if self._stopping:
                return

    _stopping = False

    def _take_group(self) -> list[_Write]:
        group: list[_Write] = []
        entry = self._waiting.get()
        while True:
            if entry is None:
                self._stopping = True
                return group
            if entry[1].set_running_or_notify_cancel():
                group.append(entry)
            if len(group) >= _MAX_GROUP:
                return group
            try:
                entry = self._waiting.get_nowait()
            except queue.Empty:
                return group

    def _commit(self, group: list[_Write]) -> None:
        outcomes: list[tuple[Future[Any], Any, BaseException | None]] = []
        committing = ""
        try:
            with self.engine.connect() as raw:
                connection = raw.execution_options(writer=True)
                with connection.begin(), Session(connection, join_transaction_mode="rollback_only") as session:
                    assert self._writership is not None
                    transaction = self._writership.check(connection)
                    for change, future in group:
                        outcomes.append((future, *_run(session, change, self._name)))
                    committing = transaction  # what is sent next is COMMIT
        except Exception as error:
            failure = self._failure(error, committing)
            if failure is not None:
                for _, future in group:
                    future.set_exception(failure)
                return
        for future, value, raised in outcomes:
            if raised is not None:
                future.set_exception(raised)
            else:
                future.set_result(value)

    def _failure(self, error: Exception, committing: str) -> ServiceError | None:
        """What the callers of a transaction that failed are told; None when it is stored all the same.

        Args:
            committing: the transaction's number, when only the answer to its COMMIT is missing; "" otherwise.
        """
        if committing:
            logger.warning("a commit failed, asking what became of it", extra={"service": self._name})
            outcome = self._outcome(committing)
            logger.warning("what became of it", extra={"service": self._name, "outcome": str(outcome)})
            if outcome is Outcome.COMMITTED:
                return None
            if outcome is Outcome.FORGOTTEN:
                self._on_superseded()
            if outcome is not Outcome.ABORTED:
                return _unknown(self._name)
        return error if isinstance(error, ServiceError) else _away(self._name, error)

    def _outcome(self, transaction: str) -> Outcome:
        """Asks until the database knows, or the service stops. Other writes must not overtake this one."""
        while True:
            closing = self._closed
            outcome = look_up(self.engine, transaction)
            if outcome not in (Outcome.IN_PROGRESS, Outcome.UNREACHABLE) or closing:
                return outcome
            if outcome is Outcome.UNREACHABLE:
                self._refuse_waiting()
            time.sleep(_ASK_AGAIN_S)

    def _refuse_waiting(self) -> None:
        """Tells the writes that wait what they would find out themselves: the database is away."""
        while True:
            try:
                entry = self._waiting.get_nowait()
            except queue.Empty:
                return
            if entry is None:
                self._stopping = True
            elif entry[1].set_running_or_notify_cancel():
                entry[1].set_exception(_away(self._name, "it cannot be reached"))


_UNSTORABLE = (OverflowError, sqlalchemy.exc.DataError)
_AWAY = (sqlalchemy.exc.OperationalError, sqlalchemy.exc.InterfaceError, sqlalchemy.exc.TimeoutError)


def _away(name: str, error: BaseException | str) -> Unavailable:
    return Unavailable(
        f"{name}: the database did not take the call: {getattr(error, 'orig', None) or error}",
        reason="StorageFailed",
        hint="nothing of it is stored; free the disk or bring the database back, then try again",
    )


def _unknown(name: str) -> Unavailable:
    return Unavailable(
        f"{name} ends while the database has not said whether this call is stored",
        reason="OutcomeUnknown",
        hint="look whether it took effect before you try again",
    )


def _unstorable(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"{name}: a number or text of this call fits into no column",
        reason="ValueOutOfRange",
        hint="numbers go up to 2^63 - 1, and text holds no NUL",
    )


def _run(session: Session, change: Callable[[Session], Any], name: str) -> tuple[Any, BaseException | None]:
    """One change in a savepoint; a database that is gone or full fails the whole group instead."""
    savepoint = session.begin_nested()
    try:
        value = change(session)
        session.flush()
        savepoint.commit()
        return value, None
    except _AWAY as error:
        if session.connection().dialect.name == "sqlite" or getattr(error, "connection_invalidated", True):
            raise
        savepoint.rollback()  # PostgreSQL is there, and refused this change alone: it took too long, for instance
        return None, _away(name, error)
    except _UNSTORABLE:
        savepoint.rollback()
        return None, _unstorable(name)
    except Exception as error:
        savepoint.rollback()
        return None, error


def upsert(session: Session, table: sqlalchemy.Table, rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    """Inserts rows, or updates those whose key columns are there already. The same on SQLite and PostgreSQL.

    Args:
        rows: all with the same columns; no two with the same key.
        keys: the columns of a primary key or unique constraint.
    """
    if not rows:
        return
    connection = session.connection()
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert
    else:
        from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
    statement = insert(table)
    changes = {name: statement.excluded[name] for name in rows[0] if name not in keys}
    if changes:
        statement = statement.on_conflict_do_update(index_elements=list(keys), set_=changes)
    else:
        statement = statement.on_conflict_do_nothing(index_elements=list(keys))
    connection.execute(statement, [dict(row) for row in rows])
