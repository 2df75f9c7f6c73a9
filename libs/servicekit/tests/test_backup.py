"""Copies of a service's database and files, taken while it works."""

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest
import sqlalchemy
from hypothesis import given
from hypothesis import strategies as st
from servicekit.backup import PIECE_BYTES, database_and_files, in_threads, snapshot_sqlite, stream_files
from servicekit.errors import DataLoss, FailedPrecondition
from servicekit.store import Store
from sqlmodel import text

MIGRATIONS = Path(__file__).parent / "migrations"


@pytest.fixture
async def store(tmp_path):
    """An open store with an empty table of numbers."""
    store = Store(f"sqlite:///{tmp_path}/home/service.db", migrations=MIGRATIONS, name="service")
    await store.open()
    await store.write(lambda session: session.exec(text("CREATE TABLE number (value INTEGER)")))
    yield store
    await store.close()


def numbers(path):
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [value for (value,) in connection.execute("SELECT value FROM number ORDER BY value")]


async def add(store, *values):
    for value in values:
        await store.write(lambda session, value=value: session.exec(text(f"INSERT INTO number VALUES ({value})")))


async def test_a_snapshot_holds_everything_committed_before_it_and_is_one_file(store, tmp_path):
    await add(store, 1, 2, 3)
    folder = tmp_path / "copy"
    folder.mkdir()
    snapshot_sqlite(store.engine, folder / "service.db")
    await add(store, 4)
    assert [path.name for path in folder.iterdir()] == ["service.db"]
    assert numbers(folder / "service.db") == [1, 2, 3]


async def test_a_snapshot_amid_writes_is_whole_and_stops_nobody(store, tmp_path):
    started = threading.Event()

    async def write():
        for first in range(0, 400, 2):
            pair = f"INSERT INTO number VALUES ({first}), ({first + 1})"
            await store.write(lambda session, pair=pair: session.exec(text(pair)))
            started.set()

    writing = asyncio.create_task(write())
    await asyncio.to_thread(started.wait)
    await asyncio.to_thread(snapshot_sqlite, store.engine, tmp_path / "copy.db")
    await writing
    found = numbers(tmp_path / "copy.db")
    assert found == list(range(len(found)))
    assert len(found) % 2 == 0


async def test_a_snapshot_never_replaces_a_file(store, tmp_path):
    (tmp_path / "copy.db").write_text("mine")
    with pytest.raises(FileExistsError):
        snapshot_sqlite(store.engine, tmp_path / "copy.db")
    assert (tmp_path / "copy.db").read_text() == "mine"


async def test_a_snapshot_that_fails_leaves_nothing(store, tmp_path):
    await store.close()
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"this is not a database" * 1000)
    with pytest.raises(sqlite3.Error):
        snapshot_sqlite(sqlalchemy.create_engine(f"sqlite:///{damaged}"), tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()


def test_postgresql_is_refused_with_what_to_use_instead(tmp_path):
    engine = sqlalchemy.create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none")
    with pytest.raises(FailedPrecondition) as refused:
        snapshot_sqlite(engine, tmp_path / "copy.db")
    assert "pg_dump" in refused.value.hint
    assert not (tmp_path / "copy.db").exists()


@given(st.lists(st.sampled_from([0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES]), max_size=4))
def test_files_come_whole_in_order_and_in_bounded_pieces(tmp_path_factory, sizes):
    root = tmp_path_factory.mktemp("files")
    contents = {f"f{index}": bytes([index]) * size for index, size in enumerate(sizes)}
    for name, content in contents.items():
        (root / name).write_bytes(content)
    received: dict[str, bytes] = {}
    for piece in stream_files(root, [(root / name).relative_to(root) for name in contents]):
        assert len(piece.data) <= PIECE_BYTES
        received[piece.path] = received.get(piece.path, b"") + piece.data
    assert list(received.items()) == list(contents.items())


def test_a_file_that_grows_is_sent_as_long_as_it_was(tmp_path):
    file = tmp_path / "journal"
    file.write_bytes(b"a" * (PIECE_BYTES + 1))
    pieces = stream_files(tmp_path, [file.relative_to(tmp_path)])
    first = next(pieces)
    with file.open("ab") as growing:
        growing.write(b"b")
    assert first.data + b"".join(piece.data for piece in pieces) == b"a" * (PIECE_BYTES + 1)


def test_a_file_that_becomes_shorter_is_an_error(tmp_path):
    file = tmp_path / "journal"
    file.write_bytes(b"a" * (2 * PIECE_BYTES))
    pieces = stream_files(tmp_path, [file.relative_to(tmp_path)])
    next(pieces)
    file.write_bytes(b"")
    with pytest.raises(DataLoss, match="journal became shorter"):
        next(pieces)


async def test_files_are_listed_once_the_database_is_taken(store, tmp_path):
    home = tmp_path / "home"
    await add(store, 1)
    (home / "file").write_bytes(b"content")

    def files():
        assert [path.name for path in home.glob(".backup-*/*")] == []
        return [(home / "file").relative_to(home)]

    received = [piece async for piece in in_threads(database_and_files(store.engine, "service.db", home, files))]
    assert [received[0].path, received[-1].path] == ["service.db", "file"]
    (tmp_path / "copy.db").write_bytes(b"".join(piece.data for piece in received if piece.path == "service.db"))
    assert numbers(tmp_path / "copy.db") == [1]


async def test_a_reader_that_leaves_early_leaves_no_snapshot_behind(store, tmp_path):
    pieces = in_threads(database_and_files(store.engine, "service.db", tmp_path / "home"))
    await anext(pieces)
    await pieces.aclose()
    assert list((tmp_path / "home").glob(".backup-*")) == []


async def test_a_call_that_is_cancelled_while_a_piece_is_read_closes_the_iterator(tmp_path):
    reading, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def items():
        try:
            reading.set()
            go_on.wait()
            yield 1
        finally:
            closed.set()

    task = asyncio.create_task(anext(in_threads(items())))
    await asyncio.to_thread(reading.wait)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed.is_set()
