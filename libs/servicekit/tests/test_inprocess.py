"""Messages within one process, without a clock."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
from kombu import Connection, Consumer, Queue
from servicekit.ids import new_id
from servicekit.inprocess import SCHEME, bell

from scripts.testbed.patience import PATIENCE_S

WAIT_S = PATIENCE_S


@pytest.fixture
def connection() -> Iterator[Connection]:
    with Connection(f"{SCHEME}://") as connection:
        yield connection


@pytest.fixture
def name() -> str:
    return new_id()


def put(name: str, *texts: str) -> None:
    with Connection(f"{SCHEME}://") as other:
        for text in texts:
            other.SimpleQueue(name).put(text)


def test_a_message_wakes_the_one_who_waits_for_it(connection: Connection, name: str) -> None:
    taken: queue.Queue[object] = queue.Queue()
    with Consumer(connection, [Queue(name)], callbacks=[lambda body, _: taken.put(body)], no_ack=True):

        def drain() -> None:
            while taken.empty():  # the bell rings for others too
                try:
                    connection.drain_events(timeout=None)
                except TimeoutError:
                    continue

        thread = threading.Thread(target=drain, daemon=True)
        thread.start()
        put(name, "hello")
        assert taken.get(timeout=WAIT_S) == "hello"
        bell.ring()
        taken.put("end")
        thread.join(WAIT_S)


def test_the_bell_ends_a_wait_that_has_no_limit(connection: Connection, name: str) -> None:
    ended: queue.Queue[type[BaseException]] = queue.Queue()

    def drain() -> None:
        try:
            connection.drain_events(timeout=None)
        except TimeoutError as error:
            ended.put(type(error))

    with Consumer(connection, [Queue(name)]):
        thread = threading.Thread(target=drain, daemon=True)
        thread.start()
        while thread.is_alive():
            bell.ring()
            thread.join(0)
        assert ended.get(timeout=WAIT_S) is TimeoutError


def test_an_acknowledgement_makes_room_for_the_next_message(connection: Connection, name: str) -> None:
    put(name, "first", "second")
    taken = []
    with Consumer(connection, [Queue(name)], on_message=taken.append, prefetch_count=1):
        connection.drain_events(timeout=WAIT_S)
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0)
        seen = bell.count
        taken[0].ack()
        assert bell.count > seen
        connection.drain_events(timeout=0)
        assert [message.decode() for message in taken] == ["first", "second"]


def test_a_ring_between_looking_and_waiting_is_not_missed() -> None:
    seen = bell.count
    bell.ring()
    bell.wait(seen, timeout_s=None)
