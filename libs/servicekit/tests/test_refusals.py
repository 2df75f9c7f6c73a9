"""What a flood of refused tokens leaves behind."""

import logging

import pytest
from prometheus_client import CollectorRegistry
from servicekit.logs import JsonFormatter
from servicekit.refusals import Refusals

METHOD = "/trainyard.v1.SchedulerService/Submit"


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
async def refusals(registry, clock):
    return Refusals(registry, clock)


@pytest.fixture
def log(tmp_path):
    handler = logging.FileHandler(tmp_path / "yard.log")
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("servicekit.refusals")
    logger.addHandler(handler)
    yield tmp_path / "yard.log"
    logger.removeHandler(handler)
    handler.close()


def flood(refusals, calls, peer):
    for number in range(calls):
        refusals.add(peer(number), METHOD, "BadToken")


async def test_one_peer_has_one_line_a_minute_with_the_number_that_is_omitted(refusals, clock, caplog):
    flood(refusals, 10, lambda port: f"ipv4:10.0.0.1:{port}")
    clock.now = 59
    refusals.report_omitted()
    assert [record.omitted for record in caplog.records] == [0]
    clock.now = 60
    refusals.report_omitted()
    assert [(record.omitted, record.peer) for record in caplog.records] == [
        (0, "ipv4:10.0.0.1"),
        (8, "ipv4:10.0.0.1"),  # and this one stands for the tenth
    ]


@pytest.mark.parametrize(
    "peer",
    [
        pytest.param(lambda number: f"ipv4:10.0.0.1:{number}", id="one peer"),
        pytest.param(lambda number: f"ipv6:[2001:db8::{number:x}]:1", id="a peer for each call"),
    ],
)
async def test_a_hundred_thousand_refused_calls_add_little_to_the_log_and_the_memory(
    refusals, clock, registry, log, peer
):
    for minute in range(5):
        flood(refusals, 20_000, peer)
        clock.now = 60.0 * (minute + 1)
        refusals.report_omitted()
    labels = {"method": METHOD, "reason": "BadToken"}
    assert registry.get_sample_value("trainyard_refused_tokens_total", labels) == 100_000
    assert 0 < log.stat().st_size < 100_000
    assert len(refusals._peers) <= 32


async def test_what_no_line_has_counted_is_logged_when_the_process_stops(refusals, caplog):
    flood(refusals, 10, lambda port: f"ipv4:10.0.0.1:{port}")
    for number in range(2, 40):
        flood(refusals, 2, lambda port, number=number: f"ipv4:10.0.0.{number}:{port}")
    refusals.close()
    refusals.close()
    counted = sum(record.omitted + 1 for record in caplog.records)
    assert counted == 10 + 2 * 38
    assert caplog.records[-1].peer == "other peers"


async def test_a_peer_that_stopped_is_forgotten(refusals, clock, caplog):
    refusals.add("ipv4:10.0.0.1:1", METHOD, "NoToken")
    clock.now = 60
    refusals.report_omitted()
    assert not refusals._peers
    refusals.add("ipv4:10.0.0.1:2", METHOD, "NoToken")
    assert [record.omitted for record in caplog.records] == [0, 0]
