"""Whether a service's SQLite database is the one that it wrote before.

SQLite makes a file that is missing, so a service whose database was lost begins with an empty one. A hidden note beside
the database says that there was one; the empty one then carries the time of its making (`PRAGMA user_version`, minutes)
until an operator has learned of it. One that is put back carries none.
"""

from __future__ import annotations

import datetime
import logging
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from sqlalchemy import Connection
from sqlmodel import Session

from servicekit.disk import create_once

logger = logging.getLogger(__name__)


class Presence:
    """Of one database file."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._note = database.with_name(f".{database.name}.note")
        self._file: tuple[int, int] | None = None

    def before_open(self) -> None:
        """To be called by the database's only writer, before it makes what is missing."""
        if self._note.exists() and not self._database.exists():
            logger.error("the database is missing and is made anew, empty", extra={"database": str(self._database)})
            with closing(sqlite3.connect(self._database)) as connection:
                connection.execute(f"PRAGMA user_version = {int(time.time() // 60)}")

    def opened(self) -> None:
        """The database is there, with its tables."""
        self._file = self._identity()
        if not self._note.exists():
            try:
                create_once(self._note, b"the database beside this note was made\n")
            except OSError as error:  # a full disk is no reason not to serve
                logger.warning("that the database was made cannot be noted", extra={"error": str(error)})

    @property
    def gone(self) -> bool:
        """Whether the file was removed or replaced while it is open: what is written now is in no folder."""
        return self._file is not None and self._identity() != self._file

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = self._database.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino


def missing_at(session: Session) -> str:
    """When the database was found missing and made anew; "" when it was not, or when that was acknowledged."""
    minutes = session.connection().exec_driver_sql("PRAGMA user_version").scalar_one()
    when = datetime.datetime.fromtimestamp(minutes * 60, datetime.UTC)
    return f"{when:%Y-%m-%d %H:%M} UTC" if minutes else ""


def acknowledge(connection: Connection) -> None:
    """An operator knows that the database was missing."""
    connection.exec_driver_sql("PRAGMA user_version = 0")
