"""Events are written with the change they tell of, and only the newest are kept."""

from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import sqlalchemy
from servicekit.auth import Principal, set_principal
from servicekit.errors import InvalidArgument, PermissionDenied
from servicekit.events import AdminEvent, EventLog, EventRecord, Recorder, Subject
from servicekit.peers import address_of
from servicekit.store import Store
from sqlmodel import SQLModel
from trainyard_protos.v1 import admin_pb2

MIGRATIONS = Path(__file__).parent / "migrations"
M = Subject("Artifact", "m", "id", "default")


class TestedEvent(EventRecord, table=True):
    __test__ = False
    __tablename__ = "tested_event"


@asynccontextmanager
async def opened(url):
    store = Store(url, migrations=MIGRATIONS, name="notes")
    await store.open()
    try:
        await store.write(lambda session: SQLModel.metadata.tables["tested_event"].create(session.connection()))
        yield store
    finally:
        await store.close()


@pytest.fixture
async def store(database_url):
    async with opened(database_url) as store:
        yield store


async def add(store, log, *messages, about=M):
    recorder = Recorder(log, "user/10.0.0.1")
    for message in messages:
        await store.write(
            lambda session, message=message: recorder.record(session, AdminEvent.ALIAS_SET, about, message)
        )


async def page(store, log, **fields):
    set_principal(Principal("user"))
    return (await log.page(store, admin_pb2.ListAdminEventsRequest(**fields))).events


async def test_an_event_says_who_changed_what_and_when(store):
    log = EventLog(TestedEvent)
    await add(store, log, "best: version 1 -> version 2")
    (event,) = await page(store, log)
    assert (event.actor, event.type, event.message) == ("user/10.0.0.1", "AliasSet", "best: version 1 -> version 2")
    assert (event.kind, event.object_name, event.object_id, event.workspace) == ("Artifact", "m", "id", "default")
    assert event.time_ns > 0


async def test_a_transaction_that_fails_has_no_event_and_later_ones_go_on(store):
    log = EventLog(TestedEvent)

    def change(session):
        Recorder(log, "user").record(session, AdminEvent.ALIAS_SET, M)
        raise InvalidArgument("no", reason="No")

    with pytest.raises(InvalidArgument):
        await store.write(change)
    assert await page(store, log) == []
    await add(store, log, "after")
    assert [event.message for event in await page(store, log)] == ["after"]


async def test_only_the_newest_events_are_kept(store):
    log = EventLog(TestedEvent, kept=3)
    await add(store, log, *"abcde")
    assert [event.message for event in await page(store, log)] == ["c", "d", "e"]
    rows = await store.read(lambda session: session.execute(sqlalchemy.text("SELECT count(*) FROM tested_event")))
    assert rows.scalar_one() == 3


async def test_events_come_in_pages_and_by_workspace_and_name(store):
    log = EventLog(TestedEvent)
    await add(store, log, *"ab")
    await add(store, log, "theirs", about=Subject("Artifact", "m", workspace="theirs"))
    await add(store, log, "all", about=Subject("Service", "artifacts"))
    first = await page(store, log, page_size=1)
    rest = await page(store, log, after_seq=first[0].seq, page_size=10)
    assert [event.message for event in (*first, *rest)] == ["a", "b", "all"]
    assert [event.message for event in await page(store, log, workspace="theirs")] == ["theirs", "all"]
    assert [event.message for event in await page(store, log, object_name="m")] == ["a", "b"]
    with pytest.raises(InvalidArgument):
        await page(store, log, page_size=-1)


async def test_texts_of_an_event_are_bounded(store):
    log = EventLog(TestedEvent)
    await add(store, log, "x" * 10_000, about=Subject("Job", "n" * 1000, "i" * 1000))
    (event,) = await page(store, log)
    assert (len(event.message), len(event.object_name), len(event.object_id)) == (4096, 256, 256)


async def test_attempts_may_not_read_events(tmp_path):
    set_principal(Principal("attempt", "default", "job", "attempt", 1))
    with pytest.raises(PermissionDenied):
        await EventLog(TestedEvent).page(None, admin_pb2.ListAdminEventsRequest())


def test_the_address_of_a_peer_has_neither_scheme_nor_port():
    assert address_of("ipv4:10.0.0.1:5000") == "10.0.0.1"
    assert address_of("ipv6:%5B2001:db8::1%5D:5000") == "2001:db8::1"
    assert address_of("unix:") == "unix:"
