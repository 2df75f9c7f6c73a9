"""Services that run apart, killed one by one at random moments, or stopped: the others and training go on."""

from __future__ import annotations

import random

import psutil
import pytest

from tests.conftest import SplitHome, wait_until
from tests.faults.training import Training, memory_bytes

KILLS = 6
AGENT_MEMORY = 80 * 2**20
SERVICE_GROWTH = 150 * 2**20


@pytest.fixture(scope="module")
def mode() -> str:
    return "split"


@pytest.mark.parametrize("seed", [61])
def test_metrics_and_artifacts_killed_at_random_moments_lose_nothing(shared_yard: SplitHome, tmp_path, seed):
    rng = random.Random(seed)
    training = Training.start(shared_yard, tmp_path, seed=seed)
    training.advance(1)
    for _ in range(KILLS):
        training.advance(rng.choice([0, 300, 1000]))
        victims = rng.choice([["metrics"], ["artifacts"], ["metrics", "artifacts"]])
        for name in victims:
            shared_yard.split.services[name].kill()
        training.advance(rng.randint(1, 1000))
        for name in victims:
            shared_yard.split.services[name].start()
    assert training.finish().attempt == 1


@pytest.mark.parametrize("name", ["scheduler", "launcher"])
def test_a_killed_service_of_jobs_does_not_stop_what_runs(shared_yard: SplitHome, tmp_path, name):
    training = Training.start(shared_yard, tmp_path, workers=1)
    wait_until(lambda: training.stored_steps() > 0, "points to arrive")
    shared_yard.split.services[name].kill()
    waited = training.steps + 500
    wait_until(lambda: training.stored_steps() >= waited, "metrics to take points as before")
    shared_yard.split.services[name].start()
    assert training.finish().attempt == 1


def test_metrics_that_stand_still_are_waited_for_and_no_memory_grows(shared_yard: SplitHome, tmp_path):
    training = Training.start(shared_yard, tmp_path)
    wait_until(lambda: training.stored_steps() > 0, "points to arrive")
    metrics = shared_yard.split.services["metrics"]
    before = memory_bytes(psutil.Process(metrics.process.pid))
    metrics.pause()
    training.advance(5000)
    assert memory_bytes(*shared_yard.agents()) < AGENT_MEMORY * len(shared_yard.agents())
    metrics.resume()
    waited = training.steps
    wait_until(lambda: training.stored_steps() >= waited, "what waited to be stored")
    assert memory_bytes(psutil.Process(metrics.process.pid)) - before < SERVICE_GROWTH
    assert training.finish().attempt == 1
