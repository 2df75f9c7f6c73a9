"""The spool keeps numbered records until they are acknowledged."""

import os
import resource
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from trainyard.agent.spool import Spool

batches = st.lists(st.one_of(st.binary(max_size=50), st.just(b"")), max_size=5)


class SpoolModel(RuleBasedStateMachine):
    """A spool behaves like a list whose start is forgotten, whoever goes on with it."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.spool = Spool(Path(self.folder.name), segment_bytes=64)
        self.records: list[bytes] = []
        self.marks: dict[int, bytes] = {}
        self.acknowledged = 0

    def teardown(self):
        self.spool.close()
        self.folder.cleanup()

    @rule(records=batches)
    def append(self, records):
        self.spool.append(records)
        self.records += records

    @rule(records=batches.filter(len), source=st.integers(-2, 3), place=st.binary(max_size=20))
    def append_what_a_source_had(self, records, source, place):
        self.spool.append(records, source, place)
        self.records += records
        self.marks[source] = place

    @rule(records=batches.filter(len), cut=st.integers(1, 30))
    def die_while_writing(self, records, cut):
        folder = Path(self.folder.name)
        before = {path: path.stat().st_size for path in folder.iterdir()}
        self.spool.append(records, 0, b"not reached")
        self.spool.close()
        [path] = [path for path in folder.iterdir() if path.stat().st_size != before.get(path)]
        os.truncate(path, max(before.get(path, 0), path.stat().st_size - cut))
        self.spool = Spool.reopen(folder)
        self.spool._segment_bytes = 64

    @rule(data=st.data())
    def acknowledge(self, data):
        self.acknowledged = data.draw(st.integers(self.acknowledged, len(self.records)))
        self.spool.forget(self.acknowledged)

    @rule()
    def another_process_goes_on(self):
        self.spool.close()
        self.spool = Spool.reopen(Path(self.folder.name))
        self.spool._segment_bytes = 64
        found = []
        while records := self.spool.read(self.acknowledged + len(found), 100, 1_000_000):
            found += records
        assert found == self.records[self.acknowledged :]

    @rule(data=st.data(), limit=st.integers(1, 7))
    def read(self, data, limit):
        start = data.draw(st.integers(self.acknowledged, len(self.records)))
        assert self.spool.read(start, limit, 10**9) == self.records[start : start + limit]

    @invariant()
    def numbers_go_on(self):
        assert self.spool.next_seq == len(self.records)
        assert self.spool.marks == self.marks


SpoolModel.TestCase.settings = settings(max_examples=40, deadline=None)
TestSpool = SpoolModel.TestCase


def test_acknowledged_segments_leave_the_disk(tmp_path):
    spool = Spool(tmp_path, segment_bytes=100)
    for _ in range(20):
        spool.append([b"x" * 60])
    assert len(list(tmp_path.iterdir())) == 10
    spool.forget(20)
    assert len(list(tmp_path.iterdir())) == 1
    spool.close()


def test_a_batch_is_bounded_in_bytes(tmp_path):
    spool = Spool(tmp_path)
    spool.append([b"x" * 60] * 20)
    assert len(spool.read(0, 1000, 300)) == 5
    spool.close()


def test_a_record_that_cannot_be_written_gets_no_number_and_leaves_nothing_behind(tmp_path):
    spool = Spool(tmp_path)
    spool.append([b"one"])
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, most))
    try:
        with pytest.raises(OSError):
            spool.append([b"x" * 100])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    spool.append([b"two"])
    assert spool.read(0, 10, 1000) == [b"one", b"two"]
    spool.close()


def test_a_segment_that_cannot_be_opened_is_tried_again(tmp_path):
    folder = tmp_path / "spool"
    folder.mkdir()
    spool = Spool(folder, segment_bytes=10)
    spool.append([b"longer than a segment"])
    folder.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        spool.append([b"nowhere"])
    (tmp_path / "away").rename(folder)
    spool.append([b"two"])
    assert spool.read(0, 10, 1000) == [b"longer than a segment", b"two"]
    spool.close()


def test_a_batch_that_was_being_written_is_not_part_of_a_reopened_spool(tmp_path):
    spool = Spool(tmp_path)
    spool.append([b"one"], 0, b"behind one")
    spool.append([b"two", b"three"], 0, b"behind three")
    spool.close()
    segment = tmp_path / "lines-000000000000"
    segment.write_bytes(segment.read_bytes()[:-1])
    left = Spool.reopen(tmp_path)
    left.append([b"four"])
    left.close()
    assert left.read(0, 10, 1000) == [b"one", b"four"]
    assert left.marks == {0: b"behind one"}
