"""Schema migrations. A service ships a folder of Alembic revisions (`versions/`); nothing is configured beside it.

Alembic is imported only when the schema's version differs from the newest revision, which file names tell: opening an
up-to-date database stays fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine


def newest_revision(migrations: Path) -> str:
    """The newest revision: revisions are files `NNNN_what.py` in `versions/`, whose id is `NNNN`.

    Raises:
        FileNotFoundError: the folder holds none.
    """
    revisions = sorted(path.stem.split("_", 1)[0] for path in (migrations / "versions").glob("[0-9]*.py"))
    if not revisions:
        raise FileNotFoundError(f"no revisions in {migrations / 'versions'}")
    return revisions[-1]


def _current_revision(connection: Connection) -> str:
    if not sqlalchemy.inspect(connection).has_table("alembic_version"):
        return ""
    return connection.execute(sqlalchemy.text("SELECT version_num FROM alembic_version")).scalar() or ""


def upgrade(engine: Engine, migrations: Path, to: str = "") -> None:
    """Brings the schema to the newest revision, or to an earlier one.

    Raises:
        RuntimeError: the database was written by a newer release.
    """
    newest = to or newest_revision(migrations)
    with engine.connect() as connection:
        current = _current_revision(connection)
    if current == newest:
        return
    if current > newest:
        raise RuntimeError(
            f"{engine.url.render_as_string()} has schema {current}, newer than this release's {newest}: "
            "use the release that wrote it"
        )
    _run_alembic(engine, migrations, newest)


def require_newest(engine: Engine, migrations: Path) -> None:
    """Refuses a schema that is not the newest revision.

    Raises:
        RuntimeError: the database was written by another release.
    """
    newest = newest_revision(migrations)
    with engine.connect() as connection:
        current = _current_revision(connection)
    if current != newest:
        raise RuntimeError(
            f"{migrations.parent.name}: the database has schema {current or 'none'}, and this release reads {newest}; "
            "'yard up' upgrades what an earlier release wrote"
        )


@contextmanager
def _unhurried(connection: Connection) -> Iterator[None]:
    """A change of a large table may take longer than a statement of a service."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
    yield


def _run_alembic(engine: Engine, migrations: Path, newest: str) -> None:
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(migrations))
    script = ScriptDirectory.from_config(config)
    with engine.connect() as raw:
        connection = raw.execution_options(writer=True)
        with (
            connection.begin(),
            _unhurried(connection),
            EnvironmentContext(
                config, script, fn=lambda revision, _: script._upgrade_revs(newest, revision)
            ) as environment,
        ):
            environment.configure(connection=connection, render_as_batch=True, transactional_ddl=False)
            environment.run_migrations()
