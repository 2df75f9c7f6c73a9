"""Watchers that keep up are told from memory; those that are behind go to the table."""

from __future__ import annotations

import pytest
from trainyard_scheduler import watch
from trainyard_scheduler.tables import Event
from trainyard_scheduler.watch import EventHub


def events(*numbers: int) -> list[Event]:
    return [Event.model_construct(seq=number, object_id="j-1") for number in numbers]


def after(hub: EventHub, seq: int) -> list[int] | None:
    found = hub.after(seq)
    return None if found is None else [event.seq for event in found]


def test_who_keeps_up_gets_all_that_came_since_in_order() -> None:
    hub = EventHub()
    hub.open(4)
    hub.publish(events(5, 7))  # what was undone leaves a hole
    hub.publish(events(8))
    assert [after(hub, seq) for seq in (4, 5, 6, 8)] == [[5, 7, 8], [7, 8], [7, 8], []]


def test_what_was_there_before_is_in_the_table_alone() -> None:
    hub = EventHub()
    hub.open(4)
    hub.publish(events(5))
    assert after(hub, 3) is None


def test_only_the_newest_events_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_KEPT", 2)
    hub = EventHub()
    hub.publish(events(1, 2, 3))
    assert (after(hub, 0), after(hub, 1)) == (None, [2, 3])
