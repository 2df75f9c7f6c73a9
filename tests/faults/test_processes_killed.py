"""Processes of a job killed between logging and sending: what was logged is stored, and the retry continues it."""

from __future__ import annotations

import random

import psutil
import pytest

from tests.conftest import YardHome, wait_until
from tests.faults.trainer import evidence
from tests.faults.training import Training, yard_process


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue  # it went with another one


def next_attempt(training: Training, number: int) -> None:
    """Waits until the workers of this attempt train."""
    wait_until(lambda: any(told.attempt >= number for told in evidence.read_diaries(training.folder)), "a new attempt")
    training.advance(1)


@pytest.mark.parametrize(("victims", "nodes"), [("workers", 1), ("agents", 1), ("agents", 2)])
def test_what_a_killed_process_logged_but_never_sent_is_stored(yard: YardHome, tmp_path, victims, nodes):
    training = Training.start(yard, tmp_path, nodes=nodes, workers=2 // nodes)
    wait_until(lambda: training.checkpoints(), "a checkpoint")
    yard.kill()  # what is logged from now on cannot be sent
    training.advance(1000)
    kill(getattr(yard, victims)())
    yard.up()
    next_attempt(training, 2)
    assert training.finish().attempt == 2


@pytest.mark.parametrize("seed", [21])
def test_retries_after_random_kills_leave_each_step_once(yard: YardHome, tmp_path, seed):
    rng = random.Random(seed)
    training = Training.start(yard, tmp_path, seed=seed, workers=2)
    for attempt in range(1, 6):
        next_attempt(training, attempt)
        training.advance(rng.randint(1, 2500))
        everything = [yard_process(yard), *yard.agents(), *yard.workers()]
        victims = rng.choice([[rng.choice(yard.workers())], yard.agents(), yard.workers(), everything])
        kill(victims)
        yard.up()
    next_attempt(training, 6)
    assert training.finish().attempt >= 6
