"""Records are stored once, in order, and are on disk before they are acknowledged."""

import struct

import grpc
import numpy as np
import pytest
from servicekit.errors import ERROR_KEY, reason_of
from trainyard_protos.v1 import common_pb2
from trainyard_protos.v1 import metrics_pb2 as pb

from services.metrics.tests.metrics_kit import append, block, lines, open_run, points, refused, run_id, series, texts


def fields_of(error):
    return dict(common_pb2.ErrorInfo.FromString(dict(error.trailing_metadata())[ERROR_KEY]).fields)


async def position(stub, writer="w", run=1):
    return (await stub.GetPosition(pb.GetPositionRequest(run_id=run_id(run), writer_id=writer))).next_seq


async def test_what_was_acknowledged_is_there_after_a_restart(ingestor):
    await open_run(ingestor.user())
    batches = [points([1.0, 2.0]), points([3.0], first=2), lines(["hello"])]
    assert await append(ingestor.user(), *batches) == {"w": 3, "node-0": 1}
    await ingestor.restart()
    assert list((await series(ingestor.user()))["loss", 0].value) == [1.0, 2.0, 3.0]
    assert await texts(ingestor.user()) == ["hello"]
    assert await position(ingestor.user()) == 3


async def test_a_repeated_batch_is_skipped_and_an_overlapping_one_trimmed(ingestor):
    await open_run(ingestor.user())
    batches = [points([0, 1, 2]), points([0, 1, 2]), points([1, 2, 3, 4], first=1), points([4], first=4)]
    assert await append(ingestor.user(), *batches) == {"w": 5}
    assert list((await series(ingestor.user()))["loss", 0].value) == [0, 1, 2, 3, 4]


async def test_repeated_lines_are_stored_once(ingestor):
    await open_run(ingestor.user())
    await append(ingestor.user(), lines(["a", "b"]), lines(["b", "c"], first=1))
    assert await texts(ingestor.user()) == ["a", "b", "c"]


async def test_a_hole_is_refused_with_the_number_expected(ingestor):
    await open_run(ingestor.user())
    error = await refused(append(ingestor.user(), points([0, 1]), points([5], first=5)))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.OUT_OF_RANGE, "Hole")
    assert fields_of(error)["expected"] == "2"
    assert await position(ingestor.user()) == 2


async def test_writers_are_numbered_apart(ingestor):
    await open_run(ingestor.user())
    batches = [points([1], writer="a"), points([2], writer="b", rank=1), points([3], first=1, writer="a")]
    assert await append(ingestor.user(), *batches) == {"a": 2, "b": 1}


async def test_values_that_are_not_finite_are_kept_bit_by_bit(ingestor):
    await open_run(ingestor.user())
    bits = [0x7FF8000000000001, 0xFFF4000000000ABC, 0x7FF0000000000000, 0xFFF0000000000000, 0x8000000000000000]
    values = np.array(bits, "<u8").view("<f8")
    await append(ingestor.user(), points(values))
    found = (await series(ingestor.user()))["loss", 0].value
    assert struct.pack("<5d", *found) == values.tobytes()


def rows(*blocks, count, first=0):
    return pb.AppendRequest(run_id=run_id(1), writer_id="w", first_seq=first, rows=pb.Rows(count=count, blocks=blocks))


def uneven(column, size):
    bad = block({"a": [1, 2], "b": [3, 4]}, row=[0, 1])
    setattr(bad, column, bytes(size))
    return rows(bad, count=2)


CONTRADICTIONS = {
    "no writer": points([1], writer=""),
    "step": uneven("step", 15),
    "time": uneven("time_ns", 8),
    "value": uneven("value", 24),
    "row": uneven("row", 4),
    "count": rows(block({"a": [1, 2]}), count=3),
    "no rows": rows(block({"a": []}), count=0),
    "twice a name": rows(pb.Block(names=["a", "a"], step=bytes(8), time_ns=bytes(8), value=bytes(16)), count=1),
    "twice a number": rows(block({"a": [1]}, row=[0]), block({"b": [1]}, row=[0]), count=2),
    "a number beyond": rows(block({"a": [1]}, row=[0]), block({"b": [1]}, row=[2]), count=2),
    "descending": rows(block({"a": [1, 2]}, row=[1, 0]), count=2),
    "no numbers": rows(block({"a": [1]}), block({"b": [1]}, row=[1]), count=2),
    "very many lines": pb.AppendRequest(
        run_id=run_id(1), writer_id="w", lines=pb.AppendRequest.Lines(lines=[common_pb2.LogLine()] * 70_000)
    ),
    "very many names": rows(pb.Block(names=["a"] * 300_000), count=0),
}


@pytest.mark.parametrize("batch", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
async def test_a_batch_that_contradicts_itself_is_refused(ingestor, batch):
    await open_run(ingestor.user())
    assert reason_of(await refused(append(ingestor.user(), batch))) == "BadBatch"
    assert await position(ingestor.user()) == 0


async def test_rows_of_several_shapes_travel_in_one_batch(ingestor):
    await open_run(ingestor.user())
    train = block({"loss": [0, 2, 3], "lr": [10, 12, 13]}, row=[0, 2, 3])
    val = block({"val": [1, 4]}, row=[1, 4], first_step=100)
    assert await append(ingestor.user(), rows(train, val, count=5)) == {"w": 5}
    found = await series(ingestor.user())
    assert {name: list(one.value) for (name, _), one in found.items()} == {
        "loss": [0, 2, 3],
        "lr": [10, 12, 13],
        "val": [1, 4],
    }
    assert list(found["val", 0].step) == [100, 101]


async def test_rows_that_are_stored_are_cut_out_of_every_block(ingestor):
    await open_run(ingestor.user())
    await append(ingestor.user(), points([0, 1, 2], name="before"))
    batch = rows(block({"a": [0, 2, 4]}, row=[0, 2, 4]), block({"b": [1, 3]}, row=[1, 3]), count=5)
    assert await append(ingestor.user(), batch) == {"w": 5}
    found = await series(ingestor.user())
    assert {name: list(one.value) for (name, _), one in found.items()} == {"before": [0, 1, 2], "a": [4], "b": [3]}


async def test_a_batch_beyond_the_limit_is_refused(ingestor):
    await ingestor.restart(max_batch_bytes=1000)
    await open_run(ingestor.user())
    assert reason_of(await refused(append(ingestor.user(), points([1.0] * 200)))) == "BatchTooLarge"


async def test_a_batch_of_more_names_than_are_looked_at_at_once_is_refused(ingestor):
    await open_run(ingestor.user())
    wide = pb.Rows(count=1, blocks=[block({str(number): [1.0] for number in range(16_385)})])
    error = await refused(append(ingestor.user(), pb.AppendRequest(run_id=run_id(1), writer_id="w", rows=wide)))
    assert (reason_of(error), "16,385 names" in error.details()) == ("BadBatch", True)
    assert await position(ingestor.user()) == 0


async def test_records_need_an_open_run(ingestor):
    assert (await refused(append(ingestor.user(), points([1])))).code() == grpc.StatusCode.NOT_FOUND


async def test_a_run_id_never_becomes_another_path(ingestor):
    for bad in ("../../etc", "", "a/b", ".", run_id(1).upper().replace("0", "A")):
        request = pb.AppendRequest(run_id=bad, writer_id="w")
        assert reason_of(await refused(append(ingestor.user(), request))) == "BadRunId"


async def test_names_beyond_the_limit_stay_visible_and_do_not_stop_their_writer(ingestor):
    await ingestor.restart(max_names_per_run=2)
    await open_run(ingestor.user())
    batches = [points([index], first=index, name=f"name-{index}") for index in range(5)]
    assert await append(ingestor.user(), *batches) == {"w": 5}
    found = await series(ingestor.user())
    assert set(found) == {("name-0", 0), ("name-1", 0), ("trainyard/refused", 0)}
    assert list(found["trainyard/refused", 0].value) == [2, 3, 4]
    assert ingestor.counted("trainyard_metrics_refused_points_total") == 3


async def test_names_that_cannot_be_shown_are_refused_the_same_way(ingestor):
    await open_run(ingestor.user())
    await append(ingestor.user(), *(points([i], first=i, name=name) for i, name in enumerate(["", "x" * 300, "a\nb"])))
    assert set(await series(ingestor.user())) == {("trainyard/refused", 0)}


async def test_more_waits_than_a_stream_may_hold_are_stored_all_the_same(ingestor):
    await ingestor.restart(max_stream_batches=2, max_stream_bytes=500)
    await open_run(ingestor.user())
    batches = [points([float(index)] * 10, first=10 * index) for index in range(50)]
    assert await append(ingestor.user(), *batches) == {"w": 500}


async def test_more_runs_than_files_held_open(ingestor):
    await ingestor.restart(max_open_runs=2)
    for number in range(1, 8):
        await open_run(ingestor.user(), number, job=f"job-{number}")
        await append(ingestor.user(), points([number], run=number))
    for number in range(1, 8):
        await append(ingestor.user(), points([-number], run=number, first=1))
        found = await series(ingestor.user(), f"job-{number}")
        assert list(found["loss", 0].value) == [number, -number]


async def test_a_full_disk_is_told_and_what_was_acknowledged_stays(ingestor, monkeypatch):
    await open_run(ingestor.user())
    await append(ingestor.user(), points([0, 1]))
    with monkeypatch.context() as patch:
        patch.setattr("trainyard_metrics.storage.journal.os.fdatasync", full_disk)
        error = await refused(append(ingestor.user(), points([2], first=2), points([3], first=3)))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "DiskFull")
    assert await position(ingestor.user()) == 2
    assert await append(ingestor.user(), points([2, 3], first=2)) == {"w": 4}
    await ingestor.restart()
    assert list((await series(ingestor.user()))["loss", 0].value) == [0, 1, 2, 3]


def full_disk(descriptor):
    raise OSError(28, "No space left on device")


async def test_an_attempt_writes_to_its_own_run_alone(ingestor):
    await open_run(ingestor.user(), 1)
    await open_run(ingestor.attempt(2, fence=2), 2, fence=2)
    await append(ingestor.attempt(2, fence=2), points([1], run=2))
    error = await refused(append(ingestor.attempt(2, fence=2), points([1], run=1)))
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED


async def test_an_attempt_reads_its_own_job_alone(ingestor):
    await open_run(ingestor.user(), 1, job="other")
    stub = ingestor.attempt(2)
    for call in (series(stub, "other"), texts(stub, "other"), stub.ListRuns(pb.ListRunsRequest())):
        assert (await refused(call)).code() == grpc.StatusCode.PERMISSION_DENIED
    error = await refused(stub.DeleteJobRuns(pb.DeleteJobRunsRequest(job_id="job")))
    assert reason_of(error) == "UserOnly"


@pytest.mark.parametrize("workspace", ["../other", "a/b", "Team", "line\nbreak", "x" * 64])
async def test_a_workspace_has_a_name_that_can_be_one(ingestor, workspace):
    for call in (
        open_run(ingestor.user(), workspace=workspace),
        ingestor.user().ListRuns(pb.ListRunsRequest(workspace=workspace)),
        ingestor.user().DeleteJobRuns(pb.DeleteJobRunsRequest(workspace=workspace, job_id="job")),
    ):
        assert reason_of(await refused(call)) == "BadWorkspace"
