"""The network between agents and their yard, cut in every way networks are cut: training goes on, nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.conftest import YardHome, wait_until
from tests.faults.relay import Relay
from tests.faults.training import Training, agents_go_through, memory_bytes, yard_process

AGENT_MEMORY = 80 * 2**20


@pytest.fixture
def relay(yard: YardHome) -> Iterator[Relay]:
    """Between the agents of a yard and the yard."""
    with agents_go_through(yard) as relay:
        yield relay


def begin(yard: YardHome, tmp_path, relay: Relay) -> Training:
    """A job whose agent sends its points through the relay."""
    training = Training.start(yard, tmp_path, relay=relay)
    wait_until(lambda: training.stored_steps() > 0, "points to arrive")
    assert relay.accepted > 0, "the agent does not use the relay"
    return training


def unsent(training: Training) -> int:
    return training.steps - training.stored_steps()


def whole_again(training: Training, relay: Relay) -> None:
    """What waited arrives while training goes on."""
    waited = training.steps
    relay.heal()
    wait_until(lambda: training.stored_steps() >= waited, "what waited to be stored")
    assert training.finish().attempt == 1


@pytest.mark.parametrize("cut", ["stall", "refuse"])
def test_a_cut_network_does_not_stop_training_and_costs_nothing(yard, tmp_path, relay, cut):
    training = begin(yard, tmp_path, relay)
    getattr(relay, cut)()
    training.advance(3000)
    assert unsent(training) > 0, "the cut is none"
    whole_again(training, relay)


def test_a_network_that_is_cut_again_and_again_in_mid_message_costs_nothing(yard, tmp_path, relay):
    training = begin(yard, tmp_path, relay)
    for _ in range(10):
        known = relay.accepted
        relay.refuse()
        training.advance(100)
        relay.heal()
        wait_until(lambda known=known: relay.accepted > known, "the agent to come back")
    whole_again(training, relay)


def test_a_slow_network_delays_points_and_nothing_else(yard, tmp_path, relay):
    training = begin(yard, tmp_path, relay)
    relay.delay_s = 0.2
    training.advance(3000)
    whole_again(training, relay)


@pytest.mark.slow
def test_a_network_cut_for_a_minute_costs_nothing_and_no_memory(yard, tmp_path, relay):
    training = begin(yard, tmp_path, relay)
    relay.lose()
    training.trains_for(60)
    assert unsent(training) > 0, "the cut is none"
    assert memory_bytes(*yard.agents()) < AGENT_MEMORY * len(yard.agents())
    whole_again(training, relay)


def test_a_stopped_yard_is_waited_for_and_no_memory_grows_meanwhile(yard, tmp_path):
    training = Training.start(yard, tmp_path, pause_s=0.0005)
    wait_until(lambda: training.stored_steps() > 0, "points to arrive")
    server = yard_process(yard)
    server.suspend()  # slow, not dead: its connections stay open
    try:
        training.advance(10_000)
        assert memory_bytes(*yard.agents()) < AGENT_MEMORY * len(yard.agents())
    finally:
        server.resume()
    waited = training.steps
    wait_until(lambda: training.stored_steps() >= waited, "what waited to be stored")
    assert psutil.pid_exists(server.pid)
    assert training.finish().attempt == 1
