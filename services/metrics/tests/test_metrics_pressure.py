"""Full disks and slow callers: a clear error or a pause, never lost records, never memory without a bound."""

import asyncio
import os
import subprocess

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servicekit.budget import Budget
from servicekit.errors import reason_of
from trainyard_metrics.domain.schedule import Schedule
from trainyard_metrics.settings import Settings

from scripts.testbed.patience import PATIENCE_S
from services.metrics.tests.metrics_kit import Ingestor, append, open_run, points, refused, run_id, series


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a disk takes root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.fixture
async def on_small_disk(tmp_path, small_disk):
    """An ingestor whose runs, and nothing else, are on the small disk."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "runs").symlink_to(small_disk)
    ingestor = Ingestor(home)
    await ingestor.start(Settings(max_segment_bytes=256 * 1024))
    yield ingestor
    await ingestor.stop()


def fill(disk):
    """Takes all space that is left."""
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass


async def test_a_full_disk_is_told_keeps_what_was_acknowledged_and_goes_on_when_space_returns(
    on_small_disk, small_disk
):
    stub = on_small_disk.user()
    await open_run(stub)
    await append(stub, points(np.arange(100.0)))
    fill(small_disk)
    error = await refused(append(stub, points(np.arange(100.0, 2000.0), first=100)))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "DiskFull")
    assert on_small_disk.counted("trainyard_metrics_write_errors_total", reason="DiskFull") == 1
    assert list((await series(stub))["loss", 0].value) == list(range(100))
    (small_disk / "filler").unlink()
    assert await append(stub, points(np.arange(100.0, 2000.0), first=100)) == {"w": 2000}
    await on_small_disk.restart()
    assert list((await series(on_small_disk.user()))["loss", 0].value) == list(range(2000))


async def test_a_compaction_without_space_changes_nothing_and_works_later(on_small_disk, small_disk):
    stub = on_small_disk.user()
    await open_run(stub)
    noise = np.random.default_rng(0).standard_normal(30_000)
    for first in range(0, 30_000, 5_000):
        await append(stub, points(noise[first : first + 5_000], first=first))
    logs = on_small_disk.app._logs
    fill(small_disk)
    with pytest.raises(OSError, match="No space"):
        await logs.compactions.compact(run_id(1), 1)
    assert not list((small_disk / run_id(1)).glob("*.tmp"))
    assert (await series(stub))["loss", 0].total == 30_000
    (small_disk / "filler").unlink()
    await logs.compactions.compact(run_id(1), 1)
    assert list((small_disk / run_id(1)).glob("*.parquet"))
    assert np.array_equal((await series(stub))["loss", 0].value, noise)


async def test_a_caller_that_reads_no_acknowledgement_holds_up_nobody_else(ingestor):
    await ingestor.restart(max_stream_batches=4, max_stream_bytes=200_000, max_waiting_bytes=200_000)
    stub = ingestor.user()
    await open_run(stub)
    silent = stub.Append()
    await silent.write(points([0.0], writer="silent"))
    batches = [points(np.zeros(1000), first=1 + 1000 * number, writer="silent") for number in range(20)]
    for batch in batches[:4]:
        await silent.write(batch)
    assert await append(ingestor.user(), points(np.arange(10_000.0), writer="other")) == {"other": 10_000}
    assert ingestor.counted("trainyard_metrics_waiting_bytes") <= 200_000 + batches[0].ByteSize()
    silent.cancel()


@given(limit=st.integers(1, 50), sizes=st.lists(st.integers(1, 80), max_size=30), seed=st.randoms())
def test_what_waits_stays_within_the_bound_and_everybody_gets_a_turn(limit, sizes, seed):
    async def run():
        seen, order = [], []
        budget = Budget(limit, seen.append)

        async def use(index, size):
            await budget.take(size)
            order.append(index)
            await asyncio.sleep(0)
            budget.give_back(size)

        tasks = [asyncio.create_task(use(index, size)) for index, size in enumerate(sizes)]
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert order == list(range(len(sizes)))
        assert all(taken <= limit or taken in sizes for taken in seen)
        assert not seen or seen[-1] == 0

    asyncio.run(run())


@given(sizes=st.lists(st.integers(1, 20), min_size=2, max_size=15), data=st.data())
def test_who_stops_waiting_takes_nothing_with_it(sizes, data):
    async def run():
        seen = []
        budget = Budget(20, seen.append)
        await budget.take(20)
        tasks = [asyncio.create_task(budget.take(size)) for size in sizes]
        await asyncio.sleep(0)
        gone = [task for task in tasks if data.draw(st.booleans())]
        for task in gone:
            task.cancel()
        budget.give_back(20)
        kept = [(task, size) for task, size in zip(tasks, sizes, strict=True) if task not in gone]
        for task, size in kept:
            await asyncio.wait_for(task, PATIENCE_S)
            budget.give_back(size)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert seen[-1] == 0

    asyncio.run(run())


def test_a_run_is_taken_when_it_is_quiet_or_ready_and_not_before():
    schedule = Schedule(quiet_s=10)
    schedule.written("a", now=0)
    schedule.written("b", now=5)
    schedule.written("a", now=6)
    assert schedule.take(now=14) is None
    assert (schedule.due(), schedule.take(now=15), schedule.take(now=15)) == (15, "b", None)
    schedule.ready("c")
    assert (schedule.take(now=15), schedule.take(now=16)) == ("c", "a")
    assert (schedule.take(now=99), schedule.due()) == (None, float("inf"))


def test_what_fails_is_tried_again_later_each_time_and_not_sooner_because_it_grew():
    schedule = Schedule(quiet_s=10)
    now, delays = 0.0, []
    for _ in range(12):
        schedule.failed("a", now)
        schedule.ready("a")
        assert schedule.take(now) is None
        delays.append(schedule.due() - now)
        now = schedule.due()
        assert schedule.take(now) == "a"
    assert delays[:4] == [5, 10, 20, 40]
    assert delays[-1] == 600
    schedule.done("a")
    schedule.ready("a")
    assert schedule.take(now) == "a"
    schedule.forget("a")
    assert schedule.take(float("inf")) is None
