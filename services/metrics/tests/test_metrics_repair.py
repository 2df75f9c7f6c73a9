"""Damage is found, what can be saved is saved, what is lost is said."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from servicekit.errors import DataLoss
from trainyard_metrics.counters import Counters
from trainyard_metrics.runlogs import RunLogs
from trainyard_metrics.settings import Settings
from trainyard_metrics.storage import columnwriter
from trainyard_metrics.storage.files import segment_number
from trainyard_metrics.storage.folder import RunFolder
from trainyard_metrics.storage.repair import repair
from trainyard_metrics.upkeep import Upkeep

from services.metrics.tests.metrics_kit import run_id
from services.metrics.tests.storage_kit import Player, everything, filled, rows


def flip(path, byte):
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)


def stored(folder):
    """Points and lines of a run, opened anew."""
    opened = RunFolder(folder)
    snapshot = opened.open().snapshot(run_id(1))
    found = everything(snapshot.points()), [line.SerializeToString() for line in snapshot.lines()]
    opened.close()
    return found


def with_all_kinds(root):
    """A run of column files, a closed segment, and one that grows."""
    player = filled(root)
    player.compact()
    for _ in range(2):
        player.play((("w0", 0), [["a"]] * 3))
        player.play(("node-0", [(1, 0, "more")]))
        player.roll()
    player.play((("w0", 0), [["a"]] * 3))
    player.close()
    return player


def file_of(folder, kind):
    return min(path for path in folder.iterdir() if path.name.startswith(kind))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_bit_flips_a_repaired_run_opens_and_has_nothing_that_was_not_written(tmp_path_factory, data):
    player = with_all_kinds(tmp_path_factory.mktemp("runs"))
    folder = player.folders[0].path
    points, lines = stored(folder)
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    flip(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = repair(folder)
    left = stored(folder)
    assert set(left[0]) <= set(points) and set(left[1]) <= set(lines)
    assert len(set(left[0])) == len(left[0])
    for repaired in done:
        aside = [found for found in folder.glob("damaged-*") if found.name.endswith(repaired.path.name)]
        assert [found.read_bytes() for found in aside] == [before[repaired.path.name]]
    assert repair(folder) == []


def test_a_damaged_manifest_is_made_anew_without_loss(tmp_path):
    player = with_all_kinds(tmp_path)
    folder = player.folders[0].path
    expected = stored(folder)
    flip(folder / "manifest.json", 20)
    (done,) = repair(folder)
    assert done.lost.startswith("nothing")
    assert stored(folder) == expected


def test_a_manifest_that_is_gone_is_made_anew_without_loss(tmp_path):
    player = with_all_kinds(tmp_path)
    folder = player.folders[0].path
    expected = stored(folder)
    (folder / "manifest.json").unlink()
    assert len(repair(folder)) == 1
    assert stored(folder) == expected


def test_other_frames_of_a_damaged_segment_are_saved_and_the_lost_rows_are_named(tmp_path):
    player = Player(tmp_path)
    for _ in range(3):
        player.play((("w0", 0), [["a"]] * 10))
    folder = player.folders[0].path
    player.close()
    segment = folder / "journal-00000000.log"
    flip(segment, segment.stat().st_size // 2)
    (done,) = repair(folder)
    assert done.lost == "records 10 to 19 of w0"
    assert [fact[3] for fact in stored(folder)[0]] == [*range(10), *range(20, 30)]


def test_a_damaged_frame_header_costs_that_frame_alone(tmp_path):
    player = Player(tmp_path)
    for _ in range(3):
        player.play((("w0", 0), [["a"]] * 10))
    offsets = list(player.states[0].segments[0].rows)
    folder = player.folders[0].path
    player.close()
    flip(folder / "journal-00000000.log", offsets[1] + 9)
    (done,) = repair(folder)
    assert done.lost == "records 10 to 19 of w0"
    assert len(stored(folder)[0]) == 20


def test_other_row_groups_of_a_damaged_file_are_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(columnwriter, "GROUP_POINTS", 40)
    player = filled(tmp_path)
    player.compact()
    (file,) = player.states[0].manifest.of_kind("points")
    folder = player.folders[0].path
    player.close()
    total = len(stored(folder)[0])
    flip(folder / file.name, file.groups[1].offset + 5)
    (done,) = repair(folder)
    assert done.lost.startswith("40 points of w0")
    assert len(stored(folder)[0]) == total - 40


@pytest.mark.parametrize("kind", ["points", "lines", "journal"])
def test_a_file_that_is_gone_costs_what_was_in_it_alone(tmp_path, kind):
    player = with_all_kinds(tmp_path)
    folder = player.folders[0].path
    points, lines = stored(folder)
    file_of(folder, kind).unlink()
    assert len(repair(folder)) == 1
    left = stored(folder)
    assert left != (points, lines)
    assert (left[0] == points) == (kind == "lines")
    assert (left[1] == lines) == (kind == "points")


async def test_a_run_is_repaired_while_others_come_and_its_writers_go_on(tmp_path):
    logs = RunLogs(tmp_path, Settings(), Counters(CollectorRegistry()), lambda run, requests: None)
    upkeep = Upkeep(logs, Settings())
    async with logs.use(run_id(1)) as log:
        for first in (0, 10, 20):
            await log.stage(rows("w", 0, first, [["a"]] * 10, np.zeros))
        path = log.state.segments[0].held.path
        assert [damage async for damage in upkeep.verify(run_id(1))] == []
        flip(path, path.stat().st_size // 2)
        (damage,) = [damage async for damage in upkeep.verify(run_id(1))]
        assert damage.path == path
    repairing = asyncio.create_task(upkeep.repair(run_id(1)))
    await asyncio.sleep(0)
    async with logs.use(run_id(1)) as log:
        await log.stage(rows("w", 0, 30, [["a"]] * 5, np.zeros))
        found = await asyncio.to_thread(log.snapshot().points)
        assert found.row.tolist() == [*range(10), *range(20, 35)]
    assert [repaired.lost for repaired in await repairing] == ["records 10 to 19 of w"]
    assert [damage async for damage in upkeep.verify(run_id(1))] == []
    await logs.close()


async def test_verifying_a_run_that_does_not_open_says_why(tmp_path):
    player = with_all_kinds(tmp_path)
    folder = player.folders[0].path
    flip(folder / "manifest.json", 20)
    logs = RunLogs(folder.parent, Settings(), Counters(CollectorRegistry()), lambda run, requests: None)
    found = [damage async for damage in Upkeep(logs, Settings()).verify(run_id(1))]
    assert [damage.path.name for damage in found] == ["manifest.json"]
    with pytest.raises(DataLoss):
        async with logs.use(run_id(1)):
            pass
    await logs.close()


async def test_a_copy_taken_while_a_run_grows_is_a_run(tmp_path):
    logs = RunLogs(tmp_path / "runs", Settings(), Counters(CollectorRegistry()), lambda run, requests: None)
    upkeep = Upkeep(logs, Settings())
    async with logs.use(run_id(1)) as log:
        await log.stage(rows("w", 0, 0, [["a", "b"]] * 10, np.zeros))
        await logs.compactions.compact(run_id(1), 1)
        await log.stage(rows("w", 0, 10, [["a"]] * 10, np.zeros))
        async with upkeep.copies(run_id(1)) as copies:
            expected = everything(log.snapshot().points())
            await log.stage(rows("w", 0, 20, [["a"]] * 10, np.zeros))
            await logs.compactions.compact(run_id(1), 1)
            target = tmp_path / "copy" / run_id(1)
            target.mkdir(parents=True)
            for copy in copies:
                (target / copy.name).write_bytes(b"".join(copy.pieces(100)))
    await logs.close()
    assert stored(target)[0] == expected


async def test_lines_can_go_while_points_stay(tmp_path):
    player = with_all_kinds(tmp_path)
    folder = player.folders[0].path
    points, _ = stored(folder)
    logs = RunLogs(folder.parent, Settings(), Counters(CollectorRegistry()), lambda run, requests: None)
    await Upkeep(logs, Settings()).drop_lines(run_id(1))
    async with logs.use(run_id(1)) as log:
        assert log.position("node-0") == 8
    await logs.close()
    assert stored(folder) == (points, [])


async def test_usage_counts_files_by_kind_and_maintenance_turns_one_into_the_other(tmp_path):
    folder = with_all_kinds(tmp_path).folders[0].path
    logs = RunLogs(folder.parent, Settings(), Counters(CollectorRegistry()), lambda run, requests: None)
    upkeep = Upkeep(logs, Settings())
    before = await upkeep.usage()
    assert (before.runs, before.journals.files, before.columns.files, before.other.files) == (1, 3, 2, 1)
    assert (await upkeep.maintain()).runs == 1
    after = await upkeep.usage()
    assert (after.journals.files, after.columns.files) == (1, 6)
    assert after.journals.bytes < before.journals.bytes
    await logs.close()
    assert [segment_number(path.name) for path in folder.glob("journal*")] == [5]
