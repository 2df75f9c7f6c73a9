"""Killed anywhere and started again, a run ends with the bits of one that was never interrupted."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from libs.trainkit.tests.lives import assert_same_end, last_words, train


def killed_until_done(forks: Any, folder: Path, *, processes: int, seed: int, **options: Any) -> int:
    """Starts a run again and again, killing it at random places; returns how often it was killed."""
    chance, kills = random.Random(seed), 0
    while True:
        place = (chance.randrange(2, 12), chance.choice(["step", "backward", "evaluation", "save"]))
        ending = {"signal": (signal.SIGKILL, [place] * processes)} if kills < 3 else {}
        codes = forks.run(train, folder, processes=processes, **ending, **options)
        if not any(codes):
            return kills
        assert -signal.SIGKILL in codes, (codes, last_words(folder))
        kills += 1


EVERYTHING = {"accumulate": 3, "workers": 2, "precision": "fp16", "clip_norm": 1.0}
FOUR_BUCKETS = {"bucket_mb": 0.0005, "batch_size": 16}
CASES = [
    pytest.param(1, {}, id="one process"),
    pytest.param(1, EVERYTHING, id="one process with workers, accumulation and loss scaling"),
    pytest.param(2, {**EVERYTHING, "strategy": "ddp"}, id="DDP"),
    pytest.param(4, FOUR_BUCKETS, id="DDP on four processes with several buckets"),
    pytest.param(2, {"strategy": "fsdp", "accumulate": 3, "clip_norm": 1.0}, id="FSDP"),
]


@pytest.mark.parametrize(("processes", "options"), CASES)
def test_a_run_killed_at_random_places_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, forks: Any, processes: int, options: dict[str, Any]
) -> None:
    forks.succeed(train, tmp_path / "whole", processes=processes, **options)

    kills = killed_until_done(forks, tmp_path / "killed", processes=processes, seed=len(options), **options)

    assert kills
    assert_same_end(tmp_path / "whole", tmp_path / "killed", processes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("accumulate", [1, 5])
def test_fsdp_on_four_processes_killed_at_random_places_ends_with_the_same_bits(
    tmp_path: Path, forks: Any, accumulate: int, seed: int
) -> None:
    options = {"strategy": "fsdp", "batch_size": 16, "accumulate": accumulate, "clip_norm": 1.0}
    forks.succeed(train, tmp_path / "whole", processes=4, **options)

    kills = killed_until_done(forks, tmp_path / "killed", processes=4, seed=seed, **options)

    assert kills
    assert_same_end(tmp_path / "whole", tmp_path / "killed", 4)
