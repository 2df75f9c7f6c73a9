"""Disks that are full: the user is told, what was stored stays readable, and all goes on when space returns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from trainyard.home import read_endpoint

from tests.conftest import YardHome, wait_until
from tests.faults.disks import SmallDisk, small_disk
from tests.faults.trainer import evidence
from tests.faults.training import Training

Make = Callable[[str, str], tuple[YardHome, SmallDisk]]


@pytest.fixture
def yard_on_small_disk(make_home: Callable[..., YardHome]) -> Iterator[Make]:
    """A yard of which one folder is on a small disk."""
    with ExitStack() as stack:

        def make(folder: str, size: str) -> tuple[YardHome, SmallDisk]:
            home = make_home()
            disk = stack.enter_context(small_disk(home.folder / folder, size))
            stack.callback(home.sweep)
            home.up()
            return home, disk

        yield make


def told(training: Training, words: str) -> bool:
    """Whether the job's events say it."""
    with training.client() as client:
        return any(words in event.message for event in client.job(training.job_id).events())


def test_a_full_disk_of_metrics_is_told_and_costs_nothing(yard_on_small_disk: Make, tmp_path):
    yard, disk = yard_on_small_disk("runs", "64m")
    training = Training.start(yard, tmp_path)
    wait_until(lambda: training.stored_steps() > 0, "points to arrive")
    disk.fill(100_000)
    wait_until(lambda: told(training, "the disk of the metrics ingestor is full"), "the user to be told")
    stored = training.stored_steps()
    training.advance(1000)
    with training.api() as api:
        found = api.stored(training.job_id)
    assert stored > 0 and all(len(series.step) > 0 for series in found.stitched), "what was stored is readable"
    assert training.stored_steps() < training.steps
    disk.free()
    assert training.finish().attempt == 1
    yard.down()


def test_a_full_disk_of_artifacts_is_told_and_costs_nothing(yard_on_small_disk: Make, tmp_path):
    yard, disk = yard_on_small_disk("packs", "64m")
    training = Training.start(yard, tmp_path)
    (first, *_) = wait_until(training.checkpoints, "a checkpoint")
    disk.fill(100_000)
    wait_until(lambda: told(training, "the disk of the artifact store is full"), "the user to be told")
    training.advance(1000)
    with training.api() as api:
        checkpoints = dict(api.stored(training.job_id).checkpoints)
    assert checkpoints[first] == evidence.weights(training.seed, first)
    too_much = tmp_path / "too-much.bin"
    too_much.write_bytes(random.Random(1).randbytes(1_000_000))
    upload = yard.run("artifacts", "put", "too-much", too_much)
    assert upload.returncode not in (0, 70), upload.stdout + upload.stderr
    assert "disk of the artifact store is full" in upload.stderr
    disk.free()
    assert training.finish().attempt == 1
    yard.down()


def test_yard_down_on_a_disk_that_is_full_altogether_ends_or_says_why_not(yard_on_small_disk: Make, tmp_path):
    yard, disk = yard_on_small_disk("", "128m")
    training = Training.start(yard, tmp_path, workers=1)
    wait_until(lambda: training.stored_steps() > 0, "points to arrive")
    disk.fill()
    down = yard.run("down", "-y")
    still_up = read_endpoint(yard.folder) is not None
    assert down.returncode not in (0, 70) if still_up else down.returncode == 0, down.stdout + down.stderr
    disk.free()
    yard.up()
    yard.down()
    yard.assert_nothing_left()
