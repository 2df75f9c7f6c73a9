"""The connection to PostgreSQL breaks at the worst moment: what is stored is known, the writer stays the writer."""

import asyncio
import contextlib
import threading

import pytest
import sqlalchemy
from servicekit.errors import Unavailable
from servicekit.outcomes import look_up

from libs.servicekit.tests.test_postgres import insert, opened, texts
from scripts.testbed.commits import CommitRelay
from scripts.testbed.patience import PATIENCE_S


@pytest.fixture
def relay(postgres_server):
    with CommitRelay(postgres_server.port) as relay:
        yield relay


@pytest.fixture
async def store(relay, postgres_url):
    async with opened(relay.url(postgres_url)) as store:
        yield store


async def lost(relay):
    assert await asyncio.to_thread(relay.lost.wait, PATIENCE_S)


async def test_a_change_whose_commit_was_carried_out_is_stored_although_the_answer_was_lost(relay, store):
    relay.lose_answer()
    assert (await store.write(insert("kept"))).rowcount == 1
    assert relay.lost.is_set()
    assert await store.read(texts) == ["kept"]


async def test_every_call_of_the_commit_gets_its_own_outcome(relay, store):
    def refuse(_session):
        raise ValueError("refused")

    relay.lose_answer()
    outcomes = await asyncio.gather(
        store.write(insert("a")), store.write(refuse), store.write(insert("b")), return_exceptions=True
    )
    assert [isinstance(outcome, ValueError) for outcome in outcomes] == [False, True, False]
    assert await store.read(texts) == ["a", "b"]


async def test_a_commit_that_never_arrived_fails_and_its_session_is_ended(relay, store):
    relay.lose_request()
    with pytest.raises(Unavailable, match="did not take the call"):
        await store.write(insert("lost"))
    await store.write(insert("after"))
    assert await store.read(texts) == ["after"]
    abandoned = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_xid IS NOT NULL"
    assert await store.read(lambda session: session.execute(sqlalchemy.text(abandoned)).scalar()) == 0


@pytest.mark.parametrize("lose", ["lose_answer", "lose_request"])
async def test_while_the_database_is_away_the_outcome_is_waited_for_and_others_fail(relay, store, lose):
    getattr(relay, lose)(then_away=True)
    unknown = asyncio.create_task(store.write(insert("unknown")))
    await lost(relay)
    for _ in range(2):
        with pytest.raises(Unavailable, match="did not take the call"):
            await store.write(insert("refused"))
    assert not unknown.done()
    relay.heal()
    if lose == "lose_answer":
        await unknown
        assert await store.read(texts) == ["unknown"]
    else:
        with pytest.raises(Unavailable, match="did not take the call"):
            await unknown
        assert await store.read(texts) == []


async def test_a_store_that_closes_meanwhile_says_that_the_outcome_is_unknown(relay, postgres_url):
    async with opened(relay.url(postgres_url)) as store:
        relay.lose_answer(then_away=True)
        unknown = asyncio.create_task(store.write(insert("kept")))
        await lost(relay)
    with pytest.raises(Unavailable) as raised:
        await unknown
    assert raised.value.reason == "OutcomeUnknown"


async def test_a_database_that_never_saw_the_transaction_is_not_written_any_more(relay, postgres_url, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr("servicekit.store.look_up", lambda engine, _number: look_up(engine, str(2**62)))
    async with opened(relay.url(postgres_url), on_superseded=ended.set) as store:
        relay.lose_answer()
        with pytest.raises(Unavailable) as raised:
            await store.write(insert("in another timeline"))
        assert raised.value.reason == "OutcomeUnknown"
        assert ended.is_set()


async def test_a_writer_that_is_cut_off_ends_its_own_session_and_stays_the_writer(relay, postgres_url, monkeypatch):
    monkeypatch.setattr("servicekit.writership._RETRY_S", 0.05)
    superseded = threading.Event()
    async with opened(relay.url(postgres_url), on_superseded=superseded.set) as store:
        before = await store.read(holder)
        for _ in range(2):
            relay.cut_clients()
            async with asyncio.timeout(PATIENCE_S):
                while (now := await holding(store)) in (None, before):
                    assert not superseded.is_set()
                    await asyncio.sleep(0.02)
            before = now
        await store.write(insert("still the writer"))
        assert not superseded.is_set()


async def test_a_writer_that_comes_back_to_find_another_in_its_place_ends(relay, postgres_url, postgres_server):
    superseded = threading.Event()
    async with opened(relay.url(postgres_url), on_superseded=superseded.set) as first:
        await first.write(insert("by the first"))
        relay.refuse()
        await asyncio.to_thread(
            postgres_server.execute,
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted",
        )
        async with opened(postgres_url, standby=True) as second:
            assert not superseded.is_set()
            relay.heal()
            assert await asyncio.to_thread(superseded.wait, PATIENCE_S)
            await second.write(insert("by the second"))
            assert await second.read(texts) == ["by the first", "by the second"]


def holder(session):
    query = (
        "SELECT pid FROM pg_locks JOIN pg_database ON pg_database.oid = database"
        " WHERE locktype = 'advisory' AND granted AND datname = current_database()"
    )
    return session.execute(sqlalchemy.text(query)).scalar()


async def holding(store):
    with contextlib.suppress(Unavailable):
        return await store.read(holder)
