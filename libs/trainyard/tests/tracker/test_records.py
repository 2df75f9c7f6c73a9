"""The tracker's log: what is written is read, whole records only, whatever happens to the writer."""

import os
import signal
import struct
import subprocess
import sys
import tempfile
import uuid
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs import Row, rows, rows_of, stretches
from trainyard.tracker import records
from trainyard.tracker.reading import LogReader, Progress, read_header
from trainyard.tracker.records import (
    FACTS,
    FIRST_SIZE,
    HEADER,
    MAX_RECORD,
    PROGRESS,
    PROGRESS_MADE,
    RESIDUE,
    SegmentFull,
    SegmentWriter,
    TooLarge,
    json_record,
    record,
    segment_path,
)
from trainyard.tracker.writing import Log

WRITER = uuid.UUID(int=7)
NAMES = ("loss", "acc")


def segment(folder: Path, index: int = 0, **options) -> SegmentWriter:
    path = segment_path(folder, str(WRITER), index)
    writer = SegmentWriter(path, writer_id=WRITER.bytes, rank=3, start_time=5, created_ns=17, index=index, **options)
    writer.publish()
    return writer


def progress(step: int) -> bytes:
    return record(PROGRESS_MADE, PROGRESS.pack(step, 0, 0))


def read_progress(folder: Path) -> list[int]:
    return [said.step for stretch in stretches(LogReader(folder, str(WRITER))) for said in stretch.progress]


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINYARD_TRACKER_DIR", str(tmp_path))
    log = Log()
    yield log
    log.close()


SIZE_OF_PROGRESS = 40


@given(steps=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=300))
def test_records_come_back_in_order_and_once(steps):
    with tempfile.TemporaryDirectory() as name:
        writer = segment(Path(name))
        reader = LogReader(Path(name), str(WRITER))
        found = []
        for step in steps:
            writer.append(progress(step))
            if step % 3 == 0:
                found += [said for stretch in stretches(reader) for said in stretch.progress]
        found += [said for stretch in stretches(reader) for said in stretch.progress]
        assert found == [Progress(step, 0, 0) for step in steps]


@given(cut=st.integers(0, 1200), count=st.integers(1, 30))
def test_a_segment_cut_anywhere_gives_its_whole_records_and_no_other(cut, count):
    with tempfile.TemporaryDirectory() as name:
        writer = segment(Path(name))
        for step in range(count):
            writer.append(progress(step))
        path = segment_path(Path(name), str(WRITER), 0)
        content = path.read_bytes()
        end = HEADER.size + cut
        path.write_bytes(content[:end] + bytes(max(0, len(content) - end)))
        assert read_progress(Path(name)) == list(range(min(count, cut // SIZE_OF_PROGRESS)))


@given(cut=st.integers(0, SIZE_OF_PROGRESS - 1), stored=st.integers(0, 40))
def test_a_record_whose_bytes_became_visible_in_any_order_is_read_when_all_are_there(cut, stored):
    with tempfile.TemporaryDirectory() as name:
        writer = segment(Path(name))
        for step in range(stored + 1):
            writer.append(progress(step))
        path = segment_path(Path(name), str(WRITER), 0)
        content = bytearray(path.read_bytes())
        last = HEADER.size + stored * SIZE_OF_PROGRESS
        whole = bytes(content)
        content[last + 8 : last + 8 + cut] = bytes(cut)  # the size is there, some of the rest is not yet
        path.write_bytes(content)
        reader = LogReader(Path(name), str(WRITER))
        found = [said.step for stretch in stretches(reader) for said in stretch.progress]
        assert found == list(range(stored + (content == whole)))
        path.write_bytes(whole)
        found += [said.step for stretch in stretches(reader) for said in stretch.progress]
        assert found == list(range(stored + 1))


@given(position=st.integers(0, SIZE_OF_PROGRESS * 10 - 1), flip=st.integers(1, 255))
def test_a_damaged_record_ends_the_log_before_it(position, flip):
    with tempfile.TemporaryDirectory() as name:
        writer = segment(Path(name))
        for step in range(10):
            writer.append(progress(step))
        path = segment_path(Path(name), str(WRITER), 0)
        content = bytearray(path.read_bytes())
        content[HEADER.size + position] ^= flip
        path.write_bytes(content)
        assert read_progress(Path(name)) == list(range(position // SIZE_OF_PROGRESS))


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=20))
def test_one_checksum_verifies_any_number_of_whole_records(payloads):
    with tempfile.TemporaryDirectory() as name:
        writer = segment(Path(name))
        size = sum(len(record(99, payload)) + 4 for payload in payloads)
        for payload in payloads:
            writer.append(record(99, payload))
        content = segment_path(Path(name), str(WRITER), 0).read_bytes()[HEADER.size : HEADER.size + size]
        assert zlib.crc32(content, RESIDUE) == RESIDUE


shapes = st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4, unique=True).map(tuple)
values = st.integers(0, 2**64 - 1)  # the bits of a float, NaNs with their payload too


@given(data=st.data(), known=st.lists(shapes, min_size=1, max_size=100), limit=st.integers(64, 5000))
def test_rows_of_many_shapes_in_any_order_are_what_was_written_bit_by_bit(data, known, limit):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINYARD_TRACKER_DIR", name)
        patch.setattr(records, "FIRST_SIZE", 4096)  # so that there are several segments
        log = Log()
        model = []
        for number, names in enumerate(data.draw(st.lists(st.sampled_from(known), max_size=200))):
            bits = data.draw(st.lists(values, min_size=len(names), max_size=len(names)))
            log.row(names, number * 2, number * 3, floats(bits))
            model.append((number, names, number * 2, number * 3, bits))
        if not model:
            return
        log.close()
        reader = LogReader(Path(name), str(log.writer_id))
        found = [row for stretch in stretches(reader, limit) for row in rows_of(stretch)]
        assert [(*row[:4], bits_of(row.values)) for row in found] == model
        assert reader.next_row == len(model)


def floats(bits: list[int]) -> tuple[float, ...]:
    return struct.unpack(f"<{len(bits)}d", struct.pack(f"<{len(bits)}Q", *bits))


def bits_of(values: tuple[float, ...]) -> list[int]:
    return list(struct.unpack(f"<{len(values)}Q", struct.pack(f"<{len(values)}d", *values)))


@given(stops=st.lists(st.integers(0, 50), max_size=10), count=st.integers(0, 300))
def test_a_reader_stops_behind_as_many_rows_as_it_is_told(stops, count):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINYARD_TRACKER_DIR", name)
        patch.setattr(records, "FIRST_SIZE", 4096)
        log = Log()
        for step in range(count + 1):
            log.row((f"name{step % 3}",), step, 0, [step])
        reader = LogReader(Path(name), str(log.writer_id))
        for stop in stops:
            target = min(reader.next_row + stop, count + 1)
            reader.skip_to(reader.next_row + stop)
            assert reader.next_row == target
        rest = [row.step for stretch in stretches(reader) for row in rows_of(stretch)]
        assert rest == list(range(count + 1 - len(rest), count + 1))
        log.close()


def test_a_log_goes_on_from_segment_to_segment(log, tmp_path):
    for step in range(20_000):
        log.row(NAMES, step, step, (step, -step))
    assert len(list(tmp_path.iterdir())) > 3
    assert rows(tmp_path) == [Row(step, NAMES, step, step, (step, -step)) for step in range(20_000)]


def test_every_segment_can_be_read_without_those_before_it(log, tmp_path):
    for step in range(5_000):
        log.row((f"name{step % 2}",), step, 0, [step])
    segments = sorted(tmp_path.iterdir())
    segments[0].unlink()
    first = read_header(segments[1]).first_row
    reader = LogReader(tmp_path, str(log.writer_id), 1)
    assert [row.number for stretch in stretches(reader) for row in rows_of(stretch)] == list(range(first, 5_000))


def test_what_comes_last_into_a_segment_is_read_before_the_next(log, tmp_path):
    log.row(NAMES, 0, 0, (1, 2))
    reader = LogReader(tmp_path, str(log.writer_id))
    assert len(list(stretches(reader))) == 1
    for step in range(1, 3_000):
        log.row(NAMES, step, 0, (1, 2))
    found = [row.step for stretch in stretches(reader) for row in rows_of(stretch)]
    assert found == list(range(1, 3_000))


def test_a_record_wider_than_a_first_segment_gets_one_of_its_size(log, tmp_path):
    names = tuple(f"name{number}" for number in range(10_000))
    log.row(names, 1, 2, range(10_000))
    [row] = rows(tmp_path)
    assert row.values == tuple(range(10_000))


def test_a_record_of_no_bytes_is_a_record(tmp_path):
    writer = segment(tmp_path)
    writer.append(record(99))
    writer.append(progress(1))
    assert read_progress(tmp_path) == [1]


def test_a_record_that_is_too_large_is_refused():
    with pytest.raises(TooLarge, match="a little less than 1,048,576 are allowed"):
        json_record(FACTS, {"note": "x" * MAX_RECORD})


def test_a_full_segment_takes_nothing_and_stays_as_it_was(tmp_path):
    writer = segment(tmp_path)
    kept = 0
    with pytest.raises(SegmentFull):
        while True:
            writer.append(progress(kept))
            kept += 1
    assert read_progress(tmp_path) == list(range(kept))
    assert kept == (FIRST_SIZE - HEADER.size - 8) // SIZE_OF_PROGRESS


def test_a_file_without_a_header_is_not_yet_a_log(tmp_path):
    path = segment_path(tmp_path, str(WRITER), 0)
    path.write_bytes(bytes(FIRST_SIZE))
    with pytest.raises(ValueError, match="not yet one"):
        LogReader(tmp_path, str(WRITER))


def test_a_segment_that_is_not_published_is_not_entered(tmp_path):
    writer = segment(tmp_path)
    writer.append(progress(1))
    following = segment_path(tmp_path, str(WRITER), 1)
    SegmentWriter(following, writer_id=WRITER.bytes, rank=3, start_time=5, created_ns=17, index=1)
    writer.append(progress(2))
    reader = LogReader(tmp_path, str(WRITER))
    assert [said.step for stretch in stretches(reader) for said in stretch.progress] == [1, 2]
    assert reader.index == 0


@pytest.mark.parametrize("after", ["the record", "the publication"])
def test_an_exception_in_the_middle_of_a_call_loses_and_doubles_nothing(log, tmp_path, monkeypatch, after):
    log.row(NAMES, 0, 0, (0, 0))
    whole = SegmentWriter.append if after == "the record" else SegmentWriter.publish
    calls = []

    def interrupted(self, *arguments):
        if after == "the record":
            end, next_row = self._end, self.next_row
            whole(self, *arguments)
            self._end, self.next_row = end, next_row  # as if the exception came right before these were stored
        calls.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(SegmentWriter, whole.__name__, interrupted)
    step = 0
    with pytest.raises(KeyboardInterrupt):
        while True:
            step += 1
            log.row(NAMES, step, 0, (0, 0))
    monkeypatch.undo()
    monkeypatch.setenv("TRAINYARD_TRACKER_DIR", str(tmp_path))
    kept = step + (after == "the record")
    for later in range(5_000):
        log.row(NAMES, 10_000 + later, 0, (0, 0))
    found = rows(tmp_path)
    assert [row.number for row in found] == list(range(kept + 5_000))
    assert [row.step for row in found] == [*range(kept), *range(10_000, 15_000)]


def test_a_fork_of_a_reader_goes_on_by_itself(log, tmp_path):
    log.row(NAMES, 1, 0, (1, 1))
    reader = LogReader(tmp_path, str(log.writer_id))
    fork = reader.fork()
    log.row(("other",), 2, 0, (2,))
    for each in (fork, reader):
        assert [row.step for stretch in stretches(each) for row in rows_of(stretch)] == [1, 2]


def test_a_reader_leaves_a_segment_that_is_about_to_go(log, tmp_path):
    reader = None
    for step in range(3_000):
        log.row(NAMES, step, 0, (1, 2))
        reader = reader or LogReader(tmp_path, str(log.writer_id))
    reader.leave(0)
    segment_path(tmp_path, str(log.writer_id), 0).unlink()
    found = [row.number for stretch in stretches(reader) for row in rows_of(stretch)]
    assert found[0] > 0 and found == list(range(found[0], 3_000))


def test_what_was_logged_before_sigkill_is_there_after_it(tmp_path):
    code = (
        "import os, signal\nfrom trainyard import tracker\n"
        "for step in range(10000): tracker.log({'loss': 1.0 / (step + 1), 'acc': step}, step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TRAINYARD_TRACKER_DIR": str(tmp_path)})
    assert result.returncode == -signal.SIGKILL
    assert [row.step for row in rows(tmp_path)] == list(range(10_000))


def test_a_shape_and_its_row_go_into_the_same_segment(log, tmp_path):
    for number in range(2_000):
        log.row((f"name{number:0200d}",), number, 0, (number,))
    assert [row.step for row in rows(tmp_path)] == list(range(2_000))
