"""Locks between the processes that use one cluster. The kernel lets go of them when their holder ends."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

from scripts.testbed import fetch
from scripts.testbed.cluster.layout import Layout

T = TypeVar("T")


@contextmanager
def changing(layout: Layout) -> Iterator[None]:
    """Held while a cluster is made or taken away: one process at a time."""
    with _held(layout, "changing", fcntl.LOCK_EX):
        yield


@contextmanager
def using(layout: Layout) -> Iterator[None]:
    """Held by each session of tests on the cluster, all along."""
    with _held(layout, "sessions", fcntl.LOCK_SH):
        yield


@contextmanager
def sharing(layout: Layout) -> Iterator[None]:
    """Held by each test that wants a cluster with all of its parts."""
    with ExitStack() as held:
        with _held(layout, "turn", fcntl.LOCK_SH):
            held.enter_context(_held(layout, "tests", fcntl.LOCK_SH))
        yield


@contextmanager
def lasting(layout: Layout, made: AbstractContextManager[T]) -> Iterator[T]:
    """Enters and leaves `made` under `sharing`, without holding it in between: for fixtures of more than one test.

    A test holds its turn already. A second one could wait for whoever wants to be alone, who waits for the first.
    """
    with ExitStack() as ending:
        turn = ending.enter_context(ExitStack())
        with sharing(layout):
            found = ending.enter_context(made)
        ending.callback(lambda: turn.enter_context(sharing(layout)))
        yield found


@contextmanager
def alone(layout: Layout) -> Iterator[None]:
    """Held by a test that stops parts of the cluster: no other test runs there meanwhile."""
    # Who waits has the turn, so that tests that begin later do not keep it waiting.
    with _held(layout, "turn", fcntl.LOCK_EX), _held(layout, "tests", fcntl.LOCK_EX):
        yield


def used(layout: Layout) -> bool:
    """Whether a session of tests is on the cluster."""
    try:
        with _held(layout, "sessions", fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
    except BlockingIOError:
        return True


@contextmanager
def _held(layout: Layout, what: str, operation: int) -> Iterator[None]:
    # Not in the cluster's own folder: a lock whose file is removed holds nobody.
    fetch.CACHE.mkdir(parents=True, exist_ok=True)
    with (fetch.CACHE / f".{layout.name}.{what}").open("w") as file:
        fcntl.flock(file, operation)
        yield
