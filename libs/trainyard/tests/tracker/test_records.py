"""The tracker's log: what is written is read, whole records only, whatever happens to the writer."""

import math
import os
import signal
import struct
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainyard.tracker.records import (
    FACTS_KIND,
    FIRST_SIZE,
    MAX_PAYLOAD,
    POINTS,
    POINTS_KIND,
    PROGRESS,
    PROGRESS_KIND,
    SHAPE_KIND,
    LogFull,
    LogReader,
    LogWriter,
    Points,
    ProgressMade,
)

payloads = st.lists(st.binary(max_size=3000), max_size=60)


def writer(folder: Path) -> LogWriter:
    return LogWriter(folder / "one.log", uuid.uuid4().bytes, rank=3, created_ns=17)


def everything(reader: LogReader) -> list:
    found = []
    while new := list(reader.read(4096)):
        found += new
    return found


def log_points(log: LogWriter, values: list[float], step: int = 0) -> None:
    log.append(POINTS_KIND, POINTS.pack(0, step, 1) + struct.pack(f"<{len(values)}d", *values))


@given(steps=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=300))
def test_records_come_back_in_order_and_once(steps):
    with tempfile.TemporaryDirectory() as name:
        log = writer(Path(name))
        reader = LogReader(log.path)
        found = []
        for step in steps:
            log.append(PROGRESS_KIND, PROGRESS.pack(step, 0, 0))
            if step % 3 == 0:
                found += reader.read()
        found += everything(reader)
        assert found == [ProgressMade(step, 0, 0) for step in steps]


@given(values=st.lists(st.floats(), min_size=1, max_size=20), repeats=st.integers(1, 50))
def test_points_are_numbered_value_by_value_without_holes(values, repeats):
    with tempfile.TemporaryDirectory() as name:
        log = writer(Path(name))
        names = [f"name{index}" for index in range(len(values))]
        log.append(SHAPE_KIND, str(names).replace("'", '"').encode())
        for step in range(repeats):
            log_points(log, values, step)
        reader = LogReader(log.path)
        found = everything(reader)
        assert [record.first_seq for record in found] == [step * len(values) for step in range(repeats)]
        assert reader.next_seq == repeats * len(values)
        assert all(same(record.values, values) for record in found)


@given(cut=st.integers(0, 2000), records=st.integers(1, 40))
def test_a_log_cut_anywhere_gives_its_whole_records_and_no_other(cut, records):
    with tempfile.TemporaryDirectory() as name:
        log = writer(Path(name))
        for step in range(records):
            log.append(PROGRESS_KIND, PROGRESS.pack(step, 0, 0))
        end = 64 + cut
        content = log.path.read_bytes()
        log.path.write_bytes(content[:end] + bytes(max(0, len(content) - end)))
        whole = min(records, cut // 40)  # a record of progress takes 9 + 24 bytes, padded to 40
        found = everything(LogReader(log.path))
        # The padding of a record may be cut without harm, so one more may be whole.
        assert found[:whole] == [ProgressMade(step, 0, 0) for step in range(whole)]
        assert len(found) in (whole, whole + 1)
        assert len(found) <= records


@given(position=st.integers(64, 64 + 39 * 5), flip=st.integers(1, 255))
def test_a_damaged_record_ends_the_log_before_it(position, flip):
    with tempfile.TemporaryDirectory() as name:
        log = writer(Path(name))
        for step in range(10):
            log.append(PROGRESS_KIND, PROGRESS.pack(step, 0, 0))
        content = bytearray(log.path.read_bytes())
        content[position] ^= flip
        log.path.write_bytes(content)
        found = everything(LogReader(log.path))
        assert found == [ProgressMade(step, 0, 0) for step in range(len(found))]
        damaged = (position - 64) // 40
        in_padding = (position - 64) % 40 >= 33
        assert len(found) == (10 if in_padding else damaged)


def test_a_log_grows_far_beyond_its_first_size(tmp_path):
    log = writer(tmp_path)
    big = b'{"note": "' + b"x" * (FIRST_SIZE // 2) + b'"}'
    for _ in range(200):
        log.append(FACTS_KIND, big)
    assert len(everything(LogReader(log.path))) == 200


def test_a_record_of_no_bytes_is_a_record(tmp_path):
    log = writer(tmp_path)
    log.append(99, b"")
    log.append(PROGRESS_KIND, PROGRESS.pack(1, 2, 3))
    assert everything(LogReader(log.path)) == [ProgressMade(1, 2, 3)]


def test_a_record_that_is_too_large_is_refused_and_leaves_the_log_as_it_was(tmp_path):
    log = writer(tmp_path)
    with pytest.raises(LogFull, match="at most 1,048,576 are allowed"):
        log.append(FACTS_KIND, b"x" * (MAX_PAYLOAD + 1))
    assert everything(LogReader(log.path)) == []


def test_a_file_without_a_header_is_not_yet_a_log(tmp_path):
    (tmp_path / "young.log").write_bytes(bytes(FIRST_SIZE))
    with pytest.raises(ValueError, match="not yet one"):
        LogReader(tmp_path / "young.log")


def test_a_fork_of_a_reader_goes_on_by_itself(tmp_path):
    log = writer(tmp_path)
    log.append(SHAPE_KIND, b'["loss"]')
    log_points(log, [1.0], step=1)
    reader = LogReader(log.path)
    fork = reader.fork()
    log_points(log, [2.0], step=2)
    assert [record.step for record in everything(fork)] == [1, 2]
    assert [record.step for record in everything(reader)] == [1, 2]


def test_what_was_logged_before_sigkill_is_there_after_it(tmp_path):
    code = (
        "import os, signal\nfrom trainyard import tracker\n"
        "for step in range(1000): tracker.log({'loss': 1.0 / (step + 1), 'acc': step}, step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TRAINYARD_TRACKER_DIR": str(tmp_path)})
    assert result.returncode == -signal.SIGKILL
    [path] = tmp_path.iterdir()
    found = everything(LogReader(path))
    assert [record.step for record in found if isinstance(record, Points)] == list(range(1000))


def same(left, right) -> bool:
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(left, right, strict=True))
