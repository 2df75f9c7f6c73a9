"""Ids: ordered by time, and told apart by the part that people see."""

from __future__ import annotations

import uuid

from servicekit.ids import Ids, new_id

NOW_MS = 1_800_000_000_000
SHOWN = 18


def test_an_id_is_a_version_7_uuid_with_the_time_of_its_making() -> None:
    made = Ids().next(NOW_MS)
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == NOW_MS


def test_ids_of_one_millisecond_grow_and_differ_in_what_is_shown() -> None:
    ids = Ids()
    made = [str(ids.next(NOW_MS)) for _ in range(10_000)]
    assert made == sorted(made)
    assert len({each[:SHOWN] for each in made}) == len(made)


def test_ids_grow_when_the_clock_goes_back() -> None:
    ids = Ids()
    assert ids.next(NOW_MS) < ids.next(NOW_MS - 60_000) < ids.next(NOW_MS + 1)


def test_ids_of_this_process_differ_in_what_is_shown() -> None:
    made = [new_id() for _ in range(1_000)]
    assert len({each[:SHOWN] for each in made}) == len(made)
