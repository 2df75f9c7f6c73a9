"""Kills, torn files, flipped bits: what was acknowledged is there once, or its loss is told."""

import contextlib
import random
import struct
import zlib

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servicekit.errors import reason_of
from trainyard_metrics.storage.files import Damaged
from trainyard_metrics.storage.journal import Journal
from trainyard_protos.v1 import metrics_pb2 as pb

from services.metrics.tests.metrics_kit import Process, append, lines, open_run, points, refused, run_id, series, texts


async def ship_until_killed(process, writer, total, kill_after):
    """Sends records from where the store is; kills the ingestor after some acknowledgements. Returns the last one."""
    request = pb.GetPositionRequest(run_id=run_id(1), writer_id=writer)
    start = (await process.stub.GetPosition(request)).next_seq

    async def batches():
        for first in range(start, total, 7):
            count = min(7, total - first)
            yield points([float(first + index) for index in range(count)], first=first, writer=writer)

    acknowledged = start
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for response in process.stub.Append(batches()):
            acknowledged = response.next_seq
            kill_after -= 1
            if kill_after == 0:
                process.kill()
    return acknowledged


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_segment_bytes": 4000, "merged_files": 2}],
    ids=["one segment", "compacting all the time"],
)
async def test_killed_again_and_again_mid_append_it_keeps_every_acknowledged_point_once(tmp_path, limits):
    total, acknowledged = 20_000, 0
    rounds = 0
    while acknowledged < total:
        async with Process(tmp_path, **limits) as process:
            await open_run(process.stub)
            position = await process.stub.GetPosition(pb.GetPositionRequest(run_id=run_id(1), writer_id="w"))
            assert position.next_seq >= acknowledged
            acknowledged = await ship_until_killed(process, "w", total, kill_after=100 if rounds < 4 else -1)
            rounds += 1
    async with Process(tmp_path, **limits) as process:
        assert list((await series(process.stub))["loss", 0].value) == [float(index) for index in range(total)]
    assert rounds == 5


async def test_an_unfinished_write_is_cut_off_and_its_records_are_asked_for_again(ingestor):
    await open_run(ingestor.user())
    await append(ingestor.user(), points([0, 1]))
    await append(ingestor.user(), points([2, 3], first=2))
    await ingestor.stop()
    records = ingestor.records(1)
    records.write_bytes(records.read_bytes()[:-5])
    await ingestor.start()
    assert await append(ingestor.user(), points([1, 2, 3, 4], first=1)) == {"w": 5}
    assert list((await series(ingestor.user()))["loss", 0].value) == [0, 1, 2, 3, 4]
    assert ingestor.counted("trainyard_metrics_torn_total") == 1


async def test_a_flipped_bit_is_told_and_other_runs_go_on(ingestor):
    await open_run(ingestor.user(), 1)
    await open_run(ingestor.user(), 2, job="other")
    await append(ingestor.user(), points([0, 1]), lines(["x"]), points([7], run=2, writer="v"))
    await append(ingestor.user(), points([2], first=2))
    await ingestor.stop()
    flip(ingestor.records(1), byte=40)
    await ingestor.start()
    for call in (series(ingestor.user()), texts(ingestor.user()), append(ingestor.user(), points([3], first=3))):
        error = await refused(call)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.DATA_LOSS, "RecordsDamaged")
        assert run_id(1) in error.details()
    assert list((await series(ingestor.user(), "other"))["loss", 0].value) == [7]
    assert ingestor.counted("trainyard_metrics_damaged_total") >= 1


async def test_a_bit_that_flips_while_the_file_is_open_fails_the_read(ingestor):
    await open_run(ingestor.user())
    await append(ingestor.user(), points([0, 1]))
    await append(ingestor.user(), lines(["x"]))
    flip(ingestor.records(1), byte=40)
    assert (await refused(series(ingestor.user()))).code() == grpc.StatusCode.DATA_LOSS
    assert await append(ingestor.user(), points([2], first=2)) == {"w": 3}


def flip(path, byte):
    content = bytearray(path.read_bytes())
    content[byte] ^= 16
    path.write_bytes(content)


def batch(first, size, writer="w"):
    return points([float(first + index) for index in range(size)], first=first, writer=writer)


def written(path, frames):
    """A journal of frames, each a list of batch sizes; returns their offsets and the end."""
    journal = Journal(path)
    assert list(journal.recover()) == []
    first, ends = 0, [journal.size]
    for sizes in frames:
        requests = []
        for size in sizes:
            requests.append(batch(first, size))
            first += size
        journal.append(requests)
        ends.append(journal.size)
    journal.close()
    return ends


frames_of_batches = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=5)


def records_of(request):
    (block,) = request.rows.blocks
    values = struct.unpack(f"<{len(block.value) // 8}d", block.value)
    return [(request.writer_id, request.first_seq + index, value) for index, value in enumerate(values)]


def checked_by_hand(path):
    """The records of a file, read by the format's description alone, without the journal's code."""
    data, offset, found = path.read_bytes(), 8, []
    assert data[:8] == b"TYRECS2\n"
    while offset < len(data):
        length, crc, check = struct.unpack_from("<III", data, offset)
        assert zlib.crc32(data[offset : offset + 8]) == check
        payload = data[offset + 12 : offset + 12 + length]
        assert zlib.crc32(payload) == crc
        offset += 12 + length
        while payload:
            (size,) = struct.unpack_from("<I", payload)
            request = pb.AppendRequest.FromString(payload[4 : 4 + size])
            found += records_of(request)
            payload = payload[4 + size :]
    return found


@settings(max_examples=50, deadline=None)
@given(frames=frames_of_batches)
def test_the_file_is_what_its_description_says(tmp_path_factory, frames):
    path = tmp_path_factory.mktemp("journal") / "run" / "records.log"
    written(path, frames)
    total = sum(map(sum, frames))
    assert checked_by_hand(path) == [("w", index, float(index)) for index in range(total)]


@settings(max_examples=100, deadline=None)
@given(frames=frames_of_batches, data=st.data())
def test_a_last_frame_torn_anywhere_is_cut_off_and_the_file_goes_on(tmp_path_factory, frames, data):
    path = tmp_path_factory.mktemp("journal") / "run" / "records.log"
    ends = written(path, frames)
    content = path.read_bytes()
    start, end = ends[-2:]
    cut = data.draw(st.integers(start, end - 1))
    # Either the file is too short, or its length is there and the content is not.
    torn = content[:cut] + data.draw(st.sampled_from([b"", bytes(end - cut)]))
    path.write_bytes(torn)
    whole = len(frames) - (torn != content)
    journal = Journal(path)
    assert len(list(journal.recover())) == whole
    journal.append([batch(0, 1)])
    journal.close()
    assert len(list(Journal(path).recover())) == whole + 1


@settings(max_examples=150, deadline=None)
@given(frames=frames_of_batches, seed=st.integers())
def test_a_bit_flipped_anywhere_is_never_read_as_data(tmp_path_factory, frames, seed):
    path = tmp_path_factory.mktemp("journal") / "run" / "records.log"
    written(path, frames)
    before = checked_by_hand(path)
    content = bytearray(path.read_bytes())
    content[random.Random(seed).randrange(len(content))] ^= 1 << random.Random(seed).randrange(8)
    path.write_bytes(content)
    found = []
    with contextlib.suppress(Damaged):
        for _, requests in Journal(path).recover():
            found += [record for request in requests for record in records_of(request)]
    assert found == before[: len(found)]
    assert len(found) < len(before)
