"""PostgreSQL goes and comes back; one process writes."""

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest
import sqlalchemy
from servicekit.errors import Unavailable
from servicekit.store import Store

from scripts.testbed.patience import PATIENCE_S

MIGRATIONS = Path(__file__).parent / "migrations"


@contextlib.asynccontextmanager
async def opened(url, **options):
    store = Store(url, migrations=MIGRATIONS, name="notes", **options)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def insert(text):
    return lambda session: session.execute(sqlalchemy.text("INSERT INTO note (text) VALUES (:t)"), {"t": text})


def texts(session):
    return list(session.execute(sqlalchemy.text("SELECT text FROM note ORDER BY id")).scalars())


async def test_while_the_database_is_away_calls_fail_and_later_ones_do_not(postgres_server, postgres_url):
    async with opened(postgres_url) as store:
        await store.write(insert("before"))
        await store.read(texts)
        await asyncio.to_thread(postgres_server.kill)
        for call in (store.write(insert("lost")), store.read(texts)):
            with pytest.raises(Unavailable, match="did not take the call"):
                await call
        await asyncio.to_thread(postgres_server.start)
        await store.write(insert("after"))
        assert await store.read(texts) == ["before", "after"]


async def test_a_restart_between_two_calls_goes_unnoticed(postgres_server, postgres_url):
    async with opened(postgres_url) as store:
        await store.write(insert("before"))
        await asyncio.to_thread(postgres_server.restart)
        await store.write(insert("after"))
        assert await store.read(texts) == ["before", "after"]


async def test_a_change_that_takes_too_long_fails_alone(postgres_url):
    async with opened(postgres_url) as store:

        def slow(session):
            session.execute(sqlalchemy.text("SET LOCAL statement_timeout = '50ms'"))
            session.execute(sqlalchemy.text("SELECT pg_sleep(60)"))

        outcomes = await asyncio.gather(
            store.write(insert("a")), store.write(slow), store.write(insert("b")), return_exceptions=True
        )
        assert isinstance(outcomes[1], Unavailable)
        assert await store.read(texts) == ["a", "b"]


async def test_a_second_writer_is_refused(postgres_url, monkeypatch):
    monkeypatch.setattr("servicekit.writership.HANDOVER_S", 0.5)
    async with opened(postgres_url):
        with pytest.raises(RuntimeError, match="one notes service at a time"):
            await Store(postgres_url, migrations=MIGRATIONS, name="notes").open()


async def test_a_second_writer_of_a_file_is_refused_at_once(tmp_path):
    url = f"sqlite:///{tmp_path}/notes.db"
    async with opened(url):
        with pytest.raises(RuntimeError, match="another process writes"):
            await Store(url, migrations=MIGRATIONS, name="notes").open()
    async with opened(url):
        pass


async def test_a_database_of_another_service_is_refused(postgres_url):
    async with opened(postgres_url):
        pass
    with pytest.raises(RuntimeError, match="belongs to the notes service"):
        await Store(postgres_url, migrations=MIGRATIONS, name="others").open()


async def test_a_stand_by_takes_over_when_the_writer_ends(postgres_url):
    async with contextlib.AsyncExitStack() as stack:
        async with opened(postgres_url) as store:
            await store.write(insert("by the first"))
            second = Store(postgres_url, migrations=MIGRATIONS, name="notes", standby=True)
            opening = asyncio.create_task(second.open())
            await asyncio.wait([opening], timeout=0.2)
            assert not opening.done()
        await opening
        stack.push_async_callback(second.close)
        await second.write(insert("by the second"))
        assert await second.read(texts) == ["by the first", "by the second"]


async def test_a_writer_that_lost_the_lock_without_knowing_cannot_write(postgres_server, postgres_url):
    superseded = threading.Event()
    async with opened(postgres_url, on_superseded=superseded.set) as first:
        await first.write(insert("by the first"))
        first._writership._take_again = lambda: None  # it does not notice: its machine hangs, say
        await asyncio.to_thread(
            postgres_server.execute,
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted",
        )
        async with opened(postgres_url, standby=True) as second:
            with pytest.raises(Unavailable, match="another process has taken over"):
                await first.write(insert("too late"))
            assert superseded.is_set()
            await second.write(insert("by the second"))
            assert await second.read(texts) == ["by the first", "by the second"]


async def test_a_writer_that_hangs_is_cut_off_by_the_stand_by(postgres_url, monkeypatch):
    monkeypatch.setattr("servicekit.writership.LEASE_S", 0.2)
    monkeypatch.setattr("servicekit.writership._RENEW_S", 0.1)
    superseded = threading.Event()
    async with opened(postgres_url, on_superseded=superseded.set) as first:
        going_on = threading.Event()
        first._writership._renew = lambda _connection: going_on.wait(PATIENCE_S)
        async with opened(postgres_url, standby=True) as second:
            await second.write(insert("by the second"))
            going_on.set()
            with pytest.raises(Unavailable, match="another process has taken over"):
                await first.write(insert("too late"))
            assert await asyncio.to_thread(superseded.wait, PATIENCE_S)


async def test_a_writer_whose_lock_was_cut_off_takes_it_again(postgres_server, postgres_url, monkeypatch):
    monkeypatch.setattr("servicekit.writership.HANDOVER_S", 0.5)
    async with opened(postgres_url) as first:
        await asyncio.to_thread(postgres_server.restart)
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        async with asyncio.timeout(PATIENCE_S):
            while await first.read(lambda session: session.execute(sqlalchemy.text(held)).scalar()) == 0:
                await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match="one notes service at a time"):
            await Store(postgres_url, migrations=MIGRATIONS, name="notes").open()
        await first.write(insert("still the writer"))
