import asyncio
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy
from servicekit.errors import InvalidArgument, Unavailable
from servicekit.store import Store
from sqlmodel import Field, Session, SQLModel, select

MIGRATIONS = Path(__file__).parent / "migrations"


class Note(SQLModel, table=True):
    id: int | None = Field(default=None, primary_key=True)
    text: str = Field(unique=True)


@pytest.fixture
async def store(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/notes.db", migrations=MIGRATIONS, name="notes")
    await store.open()
    yield store
    await store.close()


def add(text):
    def change(session: Session) -> int:
        note = Note(text=text)
        session.add(note)
        session.flush()
        return note.id

    return change


def texts(session: Session) -> list[str]:
    return list(session.exec(select(Note.text).order_by(Note.id)))


async def test_a_write_is_visible_to_reads_after_it(store):
    assert await store.write(add("a")) == 1
    assert await store.read(texts) == ["a"]


async def test_a_failing_change_undoes_itself_alone(store):
    outcomes = await asyncio.gather(
        store.write(add("a")), store.write(add("a")), store.write(add("b")), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [int, sqlalchemy.exc.IntegrityError, int]
    assert await store.read(texts) == ["a", "b"]


async def test_a_number_that_no_column_holds_is_the_callers_mistake(store):
    beyond = 2**63
    with pytest.raises(InvalidArgument, match="fits into no column"):
        await store.read(lambda session: session.exec(select(Note).where(Note.id == beyond)).all())
    with pytest.raises(InvalidArgument, match="fits into no column"):
        await store.write(lambda session: session.add(Note(id=beyond, text="a")))
    assert await store.read(texts) == []


async def test_errors_do_not_repeat_the_values_of_a_statement(store):
    await store.write(add("a secret"))
    with pytest.raises(sqlalchemy.exc.IntegrityError) as refused:
        await store.write(add("a secret"))
    assert "a secret" not in str(refused.value)


async def test_a_store_that_was_closed_says_so_at_once(store):
    await store.close()
    for call in (store.read(texts), store.write(add("a"))):
        with pytest.raises(Unavailable, match="stops"):
            await call


async def test_many_writes_share_a_commit_and_keep_their_order(store):
    await asyncio.gather(*(store.write(add(str(number))) for number in range(500)))
    assert await store.read(texts) == [str(number) for number in range(500)]


async def test_what_was_written_is_on_disk_when_the_write_returns(store, tmp_path):
    await store.write(add("durable"))
    with sqlite3.connect(tmp_path / "notes.db") as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert other.execute("SELECT text FROM note").fetchall() == [("durable",)]


async def test_a_full_disk_fails_the_write_and_the_store_recovers(store):
    with store.engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
    limit_pages(store, pages)
    with pytest.raises(Unavailable, match="did not take the change"):
        await store.write(add("x" * 1_000_000))
    limit_pages(store, 1_000_000)
    await store.write(add("after"))
    assert await store.read(texts) == ["after"]


def limit_pages(store, pages):
    """SQLite refuses to grow beyond a page limit with the same error as on a full disk; it is per connection."""
    store.engine.dispose()

    @sqlalchemy.event.listens_for(store.engine, "connect")
    def limit(connection, _record):
        connection.execute(f"PRAGMA max_page_count={pages}")


async def test_opening_again_finds_the_same_data(store, tmp_path):
    await store.write(add("kept"))
    await store.close()
    again = Store(f"sqlite:///{tmp_path}/notes.db", migrations=MIGRATIONS, name="notes")
    await again.open()
    assert await again.read(texts) == ["kept"]
    await again.close()


async def test_a_database_of_a_newer_release_is_refused(tmp_path):
    with sqlite3.connect(tmp_path / "notes.db") as connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.execute("INSERT INTO alembic_version VALUES ('9999')")
    store = Store(f"sqlite:///{tmp_path}/notes.db", migrations=MIGRATIONS, name="notes")
    with pytest.raises(RuntimeError, match="newer than this release"):
        await store.open()
