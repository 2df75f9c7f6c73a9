import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy
from servicekit.errors import InvalidArgument, Unavailable
from servicekit.store import Store, upsert
from sqlmodel import Field, Session, SQLModel, select

MIGRATIONS = Path(__file__).parent / "migrations"


class Note(SQLModel, table=True):
    id: int | None = Field(default=None, primary_key=True)
    text: str = Field(unique=True)


@pytest.fixture
async def store(database_url):
    """On SQLite, and on PostgreSQL."""
    async with opened(database_url) as store:
        yield store


@pytest.fixture
async def sqlite_store(tmp_path):
    async with opened(f"sqlite:///{tmp_path}/notes.db") as store:
        yield store


@contextlib.asynccontextmanager
async def opened(url, **options):
    store = Store(url, migrations=MIGRATIONS, name="notes", **options)
    await store.open()
    try:
        yield store
    finally:
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
        await store.write(lambda session: session.add(Note(id=beyond, text="a")))
    assert await store.read(texts) == []


async def test_a_text_that_no_column_holds_is_the_callers_mistake_or_is_kept(store):
    try:
        await store.write(add("a\0b"))
    except InvalidArgument as refused:
        assert "NUL" in refused.hint
        assert await store.read(texts) == []
    else:
        assert await store.read(texts) == ["a\0b"]


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


async def test_what_was_written_is_on_disk_when_the_write_returns(sqlite_store, tmp_path):
    await sqlite_store.write(add("durable"))
    with sqlite3.connect(tmp_path / "notes.db") as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert other.execute("SELECT text FROM note").fetchall() == [("durable",)]


async def test_a_full_disk_fails_the_write_and_the_store_recovers(sqlite_store):
    store = sqlite_store
    with store.engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
    limit_pages(store, pages)
    with pytest.raises(Unavailable, match="did not take the call"):
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


async def test_opening_again_finds_the_same_data(database_url):
    async with opened(database_url) as store:
        await store.write(add("kept"))
    async with opened(database_url) as again:
        assert await again.read(texts) == ["kept"]


async def test_a_database_of_a_newer_release_is_refused(tmp_path):
    with sqlite3.connect(tmp_path / "notes.db") as connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.execute("INSERT INTO alembic_version VALUES ('9999')")
    store = Store(f"sqlite:///{tmp_path}/notes.db", migrations=MIGRATIONS, name="notes")
    with pytest.raises(RuntimeError, match="newer than this release"):
        await store.open()


async def test_a_write_replaces_the_rows_that_are_there_and_adds_the_others(store):
    table = sqlalchemy.inspect(Note).local_table

    def put(*rows):
        return lambda session: upsert(session, table, [{"id": key, "text": text} for key, text in rows], ["id"])

    await store.write(put((1, "a"), (2, "b")))
    await store.write(put((2, "c"), (3, "d")))
    await store.write(put())
    assert await store.read(texts) == ["a", "c", "d"]


async def test_a_row_of_keys_alone_is_there_once(store):
    table = sqlalchemy.inspect(Note).local_table
    for _ in range(2):
        await store.write(lambda session: upsert(session, table, [{"id": 1, "text": "a"}], ["id", "text"][:1]))
    assert await store.read(texts) == ["a"]
