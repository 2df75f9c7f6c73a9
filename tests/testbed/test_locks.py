"""Tests that stop parts of a cluster meet nobody there: no test, and nothing that is being made for several tests."""

import fcntl
from contextlib import contextmanager

import pytest

from scripts.testbed import fetch
from scripts.testbed.cluster import locks
from scripts.testbed.cluster.layout import Layout


@pytest.fixture
def layout(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "CACHE", tmp_path)
    return Layout(8)


def could_be_alone(layout):
    """Whether a test that wants the cluster alone would get it now."""
    with (fetch.CACHE / f".{layout.name}.tests").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_what_lasts_is_made_and_removed_in_turns_and_holds_none_in_between(layout):
    seen = []

    @contextmanager
    def made():
        seen.append(("made", could_be_alone(layout)))
        yield "it"
        seen.append(("removed", could_be_alone(layout)))

    with locks.lasting(layout, made()) as found:
        seen.append((found, could_be_alone(layout)))
    assert seen == [("made", False), ("it", True), ("removed", False)]
    assert could_be_alone(layout)


def test_what_cannot_be_made_or_removed_keeps_no_turn(layout):
    @contextmanager
    def made(fails_at):
        if fails_at == "making":
            raise ValueError(fails_at)
        yield
        raise ValueError(fails_at)

    for moment in ("making", "removing"):
        with pytest.raises(ValueError, match=moment), locks.lasting(layout, made(moment)):
            assert moment == "removing"
        assert could_be_alone(layout)


def test_a_test_that_is_alone_has_no_other_beside_it(layout):
    with locks.sharing(layout):
        assert not could_be_alone(layout)
    with locks.alone(layout):
        assert not could_be_alone(layout)
    assert could_be_alone(layout)
