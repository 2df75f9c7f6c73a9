"""Services killed at random moments while workers log: training goes on, and all of it is stored."""

from __future__ import annotations

import random

import pytest

from tests.faults.training import Training

KILLS = 10


@pytest.mark.parametrize("seed", [11])
def test_a_yard_killed_at_random_moments_never_stops_training_and_loses_no_point(yard, tmp_path, seed):
    rng = random.Random(seed)
    training = Training.start(yard, tmp_path, seed=seed, workers=2)
    training.advance(1)
    for _ in range(KILLS):
        training.advance(rng.choice([0, 100, 1000]))  # 0: again before agents have sent what was not acknowledged
        yard.kill()
        training.advance(rng.randint(1, 300))  # while there is no yard
        yard.up()
    ended = training.finish()
    assert ended.attempt == 1, "no worker was started again"
