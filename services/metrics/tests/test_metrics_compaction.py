"""Compaction changes where records are, never what is read."""

import asyncio
import contextlib
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from servicekit.errors import DataLoss
from trainyard_metrics.counters import Counters
from trainyard_metrics.domain.lines import LineFilter
from trainyard_metrics.runlogs import RunLogs
from trainyard_metrics.settings import Settings
from trainyard_metrics.storage import manifest
from trainyard_metrics.storage.files import Damaged
from trainyard_metrics.storage.folder import RunFolder

from services.metrics.tests.metrics_kit import run_id
from services.metrics.tests.storage_kit import Player, actions, everything, filled, rows


@settings(max_examples=30, deadline=None)
@given(script=actions, wanted=st.sets(st.sampled_from(["a", "b", "c", "ä", "x"])), after=st.integers(0, 12))
def test_a_compacted_run_answers_as_one_that_is_not(tmp_path_factory, script, wanted, after):
    player = Player(tmp_path_factory.mktemp("runs"))
    for action in script:
        player.play(action)
    player.compact()
    compacted, plain = (state.snapshot(run_id(1)) for state in player.states)
    assert compacted.positions == plain.positions
    assert (compacted.names, compacted.count_points) == (plain.names, plain.count_points)
    later = {"w0": after, "agent": 3}
    for question in ({}, {"names": wanted}, {"ranks": [0, -1]}, {"after": later}, {"names": wanted, "after": later}):
        assert everything(compacted.points(**question)) == everything(plain.points(**question))
    filters = [LineFilter(), LineFilter(ranks=frozenset({1})), LineFilter(from_time_ns=9), LineFilter(search="a")]
    filters.append(LineFilter(regex="[0-9]"))
    for chosen in filters:
        for backwards in (False, True):
            assert list(compacted.lines(chosen, backwards=backwards)) == list(plain.lines(chosen, backwards=backwards))
    player.close()


@settings(max_examples=30, deadline=None)
@given(script=actions)
def test_rows_of_a_series_and_writer_come_in_order(tmp_path_factory, script):
    player = Player(tmp_path_factory.mktemp("runs"))
    for action in script:
        player.play(action)
    player.reopen()
    points = player.states[0].snapshot(run_id(1)).points()
    seen = {}
    for name, writer, row in zip(points.name, points.writer, points.row, strict=True):
        assert row > seen.get((name, writer), -1)
        seen[name, writer] = row
    player.close()


def test_a_snapshot_reads_on_while_its_files_are_replaced(tmp_path):
    player = filled(tmp_path)
    before = player.states[0].snapshot(run_id(1))
    expected = everything(before.points())
    reading = before.lines()
    first = next(reading)
    player.compact()
    assert everything(before.points()) == expected
    assert [first, *reading] == list(player.states[0].snapshot(run_id(1)).lines())
    player.close()


@pytest.mark.parametrize("backwards", [False, True])
def test_files_that_follow_each_other_are_read_one_after_the_other(tmp_path, backwards):
    player = Player(tmp_path)
    for text in ("early", "late"):
        player.play(("node-0", [(1, 0, text)] * 3))
        player.compact()
    files = player.states[0].manifest.of_kind("lines")
    damaged = files[0 if backwards else 1]
    path = player.folders[0].path / damaged.name
    content = bytearray(path.read_bytes())
    content[damaged.groups[0].offset] ^= 1
    path.write_bytes(content)
    reading = player.states[0].snapshot(run_id(1)).lines(backwards=backwards)
    assert {next(reading).text for _ in range(3)} == {"late" if backwards else "early"}, "the other is not looked at"
    with pytest.raises(Damaged):
        next(reading)
    player.close()


def test_replaced_files_go_when_nobody_reads_them(tmp_path):
    player = filled(tmp_path)
    snapshot = player.states[0].snapshot(run_id(1))
    player.compact()
    folder = player.folders[0].path
    assert (folder / "journal-00000000.log").exists()
    del snapshot
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "journal-00000003.log",
        "lines-00000000-00000002.parquet",
        "manifest.json",
        "points-00000000-00000002.parquet",
    ]
    player.close()


def test_anything_can_read_the_column_files(tmp_path):
    player = filled(tmp_path)
    player.compact()
    folder = player.folders[0].path
    points = pq.read_table(folder / "points-00000000-00000002.parquet", page_checksum_verification=True)
    assert points.column_names == ["name", "rank", "writer", "row", "step", "time_ns", "value"]
    rows = points.to_pylist()
    assert len(rows) == 3 * (100 + 20)
    assert rows == sorted(rows, key=lambda row: (row["name"], row["rank"], row["writer"], row["row"]))
    written = pq.read_table(folder / "lines-00000000-00000002.parquet", page_checksum_verification=True).to_pylist()
    assert [line["text"] for line in written] == ["hello", "world"] * 3
    assert set(written[0]) == {"time_ns", "writer", "seq", "node", "rank", "stream", "text"}
    player.close()


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Crash(Exception):
    pass


@pytest.mark.parametrize("step", range(8))
def test_a_crash_at_any_step_of_a_switch_leaves_every_record_once(tmp_path, monkeypatch, step):
    player = filled(tmp_path)
    expected = everything(player.states[0].snapshot(run_id(1)).points())
    calls = iter(range(100))

    def counted(function):
        def call(*arguments, **options):
            if next(calls) == step:
                raise Crash
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for module, name in ((os, "fsync"), (os, "pwrite"), (Path, "replace")):
            patch.setattr(module, name, counted(getattr(module, name)))
        with contextlib.suppress(Crash):
            player.compact()
    player.reopen()
    assert everything(player.states[0].snapshot(run_id(1)).points()) == expected
    player.compact()
    assert everything(player.states[0].snapshot(run_id(1)).points()) == expected
    player.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_bit_flipped_anywhere_in_any_file_is_found(tmp_path_factory, data):
    player = filled(tmp_path_factory.mktemp("runs"))
    player.compact()
    player.play((("w0", 0), [["a"]] * 3))
    player.roll()
    player.play((("w0", 0), [["a"]] * 3))
    folder = player.folders[0].path
    player.close()
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(path.read_bytes())
    # Of the segment that grows, a last frame that does not match counts as torn, not as damaged.
    end = 8 if path.name == "journal-00000004.log" else len(content)
    content[data.draw(st.integers(0, end - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    opened = RunFolder(folder)
    with pytest.raises(Damaged) as found:
        snapshot = opened.open().snapshot(run_id(1))
        snapshot.points()
        list(snapshot.lines())
    opened.close()
    assert found.value.path == path


@pytest.mark.parametrize("name", ["manifest.json", "points-00000000-00000002.parquet", "journal-00000003.log"])
def test_a_file_that_is_gone_is_found_and_nothing_else_removed(tmp_path, name):
    player = filled(tmp_path)
    player.compact()
    player.close()
    folder = player.folders[0].path
    (folder / name).unlink()
    before = files_of(folder)
    with pytest.raises(Damaged) as found:
        RunFolder(folder).open()
    assert found.value.path == folder / name
    assert files_of(folder) == before


def make(root, **limits):
    return RunLogs(root, Settings(**limits), Counters(CollectorRegistry()), lambda run, requests: None)


async def test_a_run_compacts_by_itself_as_it_grows_and_files_stay_few(tmp_path):
    logs = make(tmp_path, max_segment_bytes=2_000, merged_files=3)
    async with logs.use(run_id(1)) as log:
        for first in range(0, 1200, 20):
            await log.stage(rows("w", 0, first, [["a", "b"]] * 20, np.zeros))
            await asyncio.sleep(0)
        await logs.compactions.compact(run_id(1), 1)
        found = log.snapshot()
        assert len(log.state.manifest.files) <= 6
        assert not any(path.suffix == ".tmp" for path in log.folder.path.iterdir())
        points = await asyncio.to_thread(found.points, ["b"])
        assert sorted(points.row.tolist()) == list(range(1200))
    await logs.close()


async def test_a_quiet_run_is_compacted_when_it_has_enough(tmp_path):
    logs = make(tmp_path, quiet_s=0.01, min_compacted_bytes=500)
    done = asyncio.Event()
    async with logs.use(run_id(1)) as log:
        switched = log.state.switched
        log.state.switched = lambda *arguments: (switched(*arguments), done.set())
        await log.stage(rows("w", 0, 0, [["a", "b"]] * 20, np.zeros))
        await asyncio.wait_for(done.wait(), 60)
        assert [file.rows for file in log.state.manifest.files] == [40]
    await logs.close()


async def test_a_small_run_stays_one_file(tmp_path):
    logs = make(tmp_path, quiet_s=0)
    async with logs.use(run_id(1)) as log:
        await log.stage(rows("w", 0, 0, [["a"]] * 20, np.zeros))
    await logs.compactions.compact(run_id(1), 10_000)
    assert [path.name for path in (tmp_path / run_id(1)).iterdir()] == ["journal-00000000.log"]
    await logs.close()


async def test_reading_a_run_without_records_makes_no_files(tmp_path):
    logs = make(tmp_path)
    async with logs.use(run_id(1)) as log:
        assert len(log.snapshot().points()) == 0
        assert log.position("w") == 0
    await logs.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_compaction_that_fails_changes_nothing(tmp_path):
    logs = make(tmp_path, max_segment_bytes=1)
    async with logs.use(run_id(1)) as log:
        async with log.compacting:
            for first in range(3):
                await log.stage(rows("w", 0, first, [["a"]], np.zeros))
            closed = log.state.segments[0].held.path
            content = closed.read_bytes()
            closed.write_bytes(content[:-1] + b"x")
        with pytest.raises(DataLoss):
            await logs.compactions.compact(run_id(1), 1)
        assert log.state.manifest == manifest.Manifest()
        closed.write_bytes(content)
        await logs.compactions.compact(run_id(1), 1)
        assert (await asyncio.to_thread(log.snapshot().points)).row.tolist() == [0, 1, 2]
    await logs.close()


def test_a_snapshot_outlives_the_run_being_closed_and_opened(tmp_path):
    player = filled(tmp_path)
    before = player.states[0].snapshot(run_id(1))
    expected = everything(before.points())
    player.reopen()
    player.compact()
    player.reopen()
    assert everything(before.points()) == expected
    folder = player.folders[0].path
    del before
    assert [path.name for path in folder.glob("journal-*")] == ["journal-00000003.log"]
    player.close()
