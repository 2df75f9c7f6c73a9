"""A tracker's log as the agent follows it: newest values, cuts, and space given back."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainyard.agent.followed import FILE_CLOCK_TICK_NS, FollowedLog, Newest
from trainyard.agent.sources import Gap
from trainyard.agent.tracked import Tracked
from trainyard.tracker import records
from trainyard.tracker.writing import Log


@pytest.fixture
def small_segments(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINYARD_TRACKER_DIR", str(tmp_path))
    monkeypatch.setattr(records, "FIRST_SIZE", 4096)
    monkeypatch.setattr(records, "LARGEST_SIZE", 4096)
    return tmp_path


def write(log, count, first=0):
    """Rows at one a second, whose step is the second; `loss` is every row's, `val` every tenth's."""
    for second in range(first, first + count):
        names = ("loss", "val") if second % 10 == 0 else ("loss",)
        log.row(names, second, second, [second] * len(names))


def follow(folder, log):
    return FollowedLog(folder, str(log.writer_id), 0)


def read_all(followed):
    found = []
    while new := followed.look():
        found += new
    return found


def segments(folder):
    return len(list(folder.glob("*.log")))


def test_rows_are_seen_once(small_segments):
    log = Log()
    followed = follow(small_segments, log_with(log, 1_000))
    first = sum(stretch.count for stretch in read_all(followed))
    write(log, 10, first=1_000)
    second = sum(stretch.count for stretch in read_all(followed))
    assert (first, second) == (1_000, 10)


def log_with(log, count):
    write(log, count)
    return log


def test_a_segment_goes_when_it_is_acknowledged_and_too_old_for_a_cut(small_segments):
    log = log_with(Log(), 1_000)
    followed = follow(small_segments, log)
    read_all(followed)
    before = segments(small_segments)
    followed.give_back(before_ns=10_000)
    assert segments(small_segments) == before
    followed.source.acknowledge(1_000)
    followed.give_back(before_ns=0)
    assert segments(small_segments) == before
    followed.give_back(before_ns=500)
    half = segments(small_segments)
    assert 1 < half < before
    followed.give_back(before_ns=10_000)
    assert segments(small_segments) == 1


def test_what_is_not_acknowledged_can_be_read_after_the_rest_is_gone(small_segments):
    log = log_with(Log(), 1_000)
    followed = follow(small_segments, log)
    read_all(followed)
    followed.source.acknowledge(600)
    followed.give_back(before_ns=10_000)
    assert sent_from(followed.source, 600) == list(range(600, 1_000))
    assert sent_from(followed.source, 600) == list(range(600, 1_000))


def sent_from(source, seq):
    numbers = []
    while (batch := source.batch(seq)) is not None:
        assert batch.first_seq == seq
        numbers += range(seq, seq + batch.rows.count)
        seq += batch.rows.count
    return numbers


def test_rows_that_were_given_back_and_are_asked_for_again_are_a_gap(small_segments):
    log = log_with(Log(), 1_000)
    followed = follow(small_segments, log)
    read_all(followed)
    followed.source.acknowledge(1_000)
    followed.give_back(before_ns=10_000)
    with pytest.raises(Gap, match="from number 10 on, but had acknowledged all below"):
        followed.source.batch(10)


def test_another_reader_begins_where_the_log_still_is(small_segments):
    log = log_with(Log(), 1_000)
    followed = follow(small_segments, log)
    read_all(followed)
    followed.source.acknowledge(800)
    followed.give_back(before_ns=10_000)
    first = min(int(path.stem.partition(".")[2]) for path in small_segments.glob("*.log"))
    again = FollowedLog(small_segments, str(log.writer_id), first)
    assert sent_from(again.source, 800) == list(range(800, 1_000))


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 400), min_size=1, max_size=5),
    window=st.integers(0, 500),
    data=st.data(),
)
def test_a_cut_is_the_same_whatever_was_read_or_given_back_meanwhile(counts, window, data):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINYARD_TRACKER_DIR", name)
        patch.setattr(records, "FIRST_SIZE", 4096)
        patch.setattr(records, "LARGEST_SIZE", 4096)
        log = log_with(Log(), 1)
        followed = follow(Path(name), log)
        now = 1
        for count in counts:
            write(log, count, first=now)
            now += count
            if data.draw(st.booleans()):
                read_all(followed)
            followed.source.acknowledge(data.draw(st.integers(followed.source.acknowledged, now)))
            followed.give_back(before_ns=now - window)
            # The checkpoint's file changed at that second, and the script logs the step that follows it right after.
            changed = data.draw(st.integers(max(0, now - window), now))
            position, newest = followed.cut(changed, step=changed + 1)
            last = min(changed + 1, now - 1)
            assert position == last + 1
            assert newest == Newest({"loss": last, "val": last // 10 * 10}, step=last, time_ns=last)


def test_rows_of_earlier_steps_are_in_a_cut_though_the_file_looks_a_tick_older(small_segments):
    log = log_with(Log(), 100)  # at one a nanosecond: all within one tick of the clock that stamps files
    assert follow(small_segments, log).cut(40, step=80) == (81, Newest({"loss": 80, "val": 80}, step=80, time_ns=80))


def test_rows_of_earlier_steps_a_tick_later_were_logged_after_the_checkpoint(small_segments):
    log = Log()
    for second in range(10):  # another count of steps: far behind the checkpoint's
        log.row(("epoch/loss",), second, second * FILE_CLOCK_TICK_NS, [second])
    assert follow(small_segments, log).cut(4 * FILE_CLOCK_TICK_NS, step=1_000)[0] == 6


def test_without_rows_the_cut_is_at_the_start(small_segments):
    log = Log()
    log.record(records.json_record(records.FACTS, {"note": "x"}))
    assert follow(small_segments, log).cut(100, 1) == (0, Newest())


def test_a_cut_is_at_the_checkpoints_step_or_where_the_lowest_rank_had_come_to_beyond_it(small_segments, monkeypatch):
    for rank, count in ((1, 50), (0, 30)):
        monkeypatch.setenv("RANK", str(rank))
        log_with(Log(), count)
    tracked = Tracked(small_segments)
    assert [tracked.cut(40, step).step for step in (3, 29, 35)] == [29, 29, 35]  # 3: a file that counts epochs
    assert tracked.cut(40, 35).ranks == {0, 1}


def test_without_rows_a_cut_is_at_the_step_of_the_checkpoint(small_segments):
    assert Tracked(small_segments).cut(40, step=7).step == 7


def test_logs_that_begin_after_the_wall_clock_was_set_back_are_found(small_segments, monkeypatch):
    log_with(Log(), 3)
    tracked = Tracked(small_segments)
    assert tracked.look()
    monkeypatch.setenv("RANK", "1")
    log_with(Log(), 3)
    an_hour_ago = small_segments.stat().st_mtime_ns - 3600 * 10**9
    os.utime(small_segments, ns=(an_hour_ago, an_hour_ago))  # as a folder that changes then says
    assert tracked.look()
    assert {log.source.rank for log in tracked.logs} == {0, 1}
