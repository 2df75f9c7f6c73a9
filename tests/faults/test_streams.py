"""Streams as broken networks and doubled senders make them: what arrives is stored once, or refused."""

from __future__ import annotations

import random
import struct
import threading
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import grpc
import numpy as np
import pytest
from trainyard.home import token
from trainyard_protos.v1 import common_pb2, metrics_pb2

from scripts.testbed.patience import PATIENCE_S
from tests.checker import Api, stored_values
from tests.conftest import YardHome
from tests.faults.trainer.evidence import TRAIN_NAMES, train_values
from tests.faults.training import endpoint_of

SEED = 5
ERROR_KEY = "trainyard-error-bin"


@pytest.fixture(scope="module")
def api(shared_yard: YardHome) -> Iterator[Api]:
    with Api(endpoint_of(shared_yard), token(shared_yard.folder)) as api:
        yield api


@dataclass(frozen=True)
class Writer:
    """A process of a run that logs row n with the known values of step n."""

    run_id: str
    rank: int = 0
    id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def batch(self, first: int, last: int) -> metrics_pb2.AppendRequest:
        """Rows `first` to `last - 1`."""
        steps = range(first, last)
        values = np.array([train_values(SEED, 0, self.rank, step) for step in steps], dtype="<f8")
        block = metrics_pb2.Block(
            names=TRAIN_NAMES,
            step=struct.pack(f"<{len(steps)}q", *steps),
            time_ns=struct.pack(f"<{len(steps)}q", *(1_700_000_000_000_000_000 + step for step in steps)),
            value=values.T.tobytes(),
        )
        rows = metrics_pb2.Rows(rank=self.rank, count=len(steps), blocks=[block])
        return metrics_pb2.AppendRequest(run_id=self.run_id, writer_id=self.id, first_seq=first, rows=rows)

    def position(self, api: Api) -> int:
        request = metrics_pb2.GetPositionRequest(run_id=self.run_id, writer_id=self.id)
        return api.metrics.GetPosition(request, **api.with_deadline).next_seq


def open_run(api: Api, **facts: object) -> str:
    run = metrics_pb2.Run(id=str(uuid.uuid4()), workspace="default", name="stream", created_ns=1, **facts)
    return api.metrics.OpenRun(metrics_pb2.OpenRunRequest(run=run), **api.with_deadline).id


def append(api: Api, requests: Iterable[metrics_pb2.AppendRequest]) -> dict[str, int]:
    """Sends batches on one stream; what was acknowledged at last of each writer.

    Raises:
        RpcError: the stream was refused.
    """
    return {
        answer.writer_id: answer.next_seq for answer in api.metrics.Append(iter(list(requests)), **api.with_deadline)
    }


def expected_after(error: grpc.RpcError) -> int:
    """The number that a refusal says to go on with."""
    info = common_pb2.ErrorInfo.FromString(dict(error.trailing_metadata())[ERROR_KEY])
    return int(info.fields["expected"])


def assert_stored_once(api: Api, writers: Iterable[Writer], rows: int) -> None:
    """Rows 0 to `rows - 1` of every writer are there, once, with their bits, and nothing else is."""
    writers = list(writers)
    found = stored_values(api, writers[0].run_id, TRAIN_NAMES)
    assert {rank for _, rank in found} == {writer.rank for writer in writers}
    for writer in writers:
        wanted = np.array([train_values(SEED, 0, writer.rank, step) for step in range(rows)], dtype="<f8").view("<u8")
        for column, name in enumerate(TRAIN_NAMES):
            steps, bits = found[name, writer.rank]
            assert steps == list(range(rows))
            assert np.array_equal(bits, wanted[:, column])


def test_a_batch_that_comes_again_is_acknowledged_and_stored_once(api):
    writer = Writer(open_run(api))
    batches = [writer.batch(0, 100), writer.batch(0, 100), writer.batch(50, 150), writer.batch(20, 60)]
    assert append(api, batches) == {writer.id: 150}
    assert append(api, batches) == {writer.id: 150}
    assert_stored_once(api, [writer], 150)


def test_a_batch_that_would_leave_a_hole_is_refused_with_the_number_to_go_on_with(api):
    writer = Writer(open_run(api))
    with pytest.raises(grpc.RpcError) as refused:
        append(api, [writer.batch(0, 100), writer.batch(150, 200)])
    assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert expected_after(refused.value) == 100 == writer.position(api)
    append(api, [writer.batch(100, 200)])
    assert_stored_once(api, [writer], 200)


@pytest.mark.parametrize("seed", range(5))
def test_batches_in_any_order_and_number_end_as_the_stream_they_are_pieces_of(api, seed):
    rng = random.Random(seed)
    writer = Writer(open_run(api))
    rows = 600
    while (position := writer.position(api)) < rows:
        cuts = sorted(rng.sample(range(rows + 1), 6))
        pieces = [*pairwise(cuts), (max(0, position - rng.randint(0, 50)), min(rows, position + rng.randint(1, 200)))]
        rng.shuffle(pieces)
        try:
            append(api, [writer.batch(first, last) for first, last in pieces for _ in range(rng.randint(1, 2))])
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.OUT_OF_RANGE, f"seed {seed}: {error}"
    assert_stored_once(api, [writer], rows)


def test_writers_that_share_a_stream_do_not_mix(api):
    run_id = open_run(api)
    writers = [Writer(run_id, rank) for rank in range(4)]
    batches = [writer.batch(first, first + 10) for first in range(0, 200, 10) for writer in writers]
    assert append(api, batches) == {writer.id: 200 for writer in writers}
    assert_stored_once(api, writers, 200)


def test_two_senders_of_one_writer_at_once_store_it_once(api):
    writer, rows = Writer(open_run(api)), 2000
    failures: list[BaseException] = []

    def ship(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while (position := writer.position(api)) < rows:
                last = min(rows, position + rng.randint(1, 100))
                append(api, [writer.batch(max(0, position - rng.randint(0, 20)), last)])
        except BaseException as error:
            failures.append(error)

    senders = [threading.Thread(target=ship, args=(seed,)) for seed in range(2)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(PATIENCE_S)
    assert failures == []
    assert_stored_once(api, [writer], rows)


def test_an_old_attempt_can_open_no_new_run_but_may_finish_the_one_it_has(api):
    job = str(uuid.uuid4())
    old = Writer(open_run(api, job_id=job, fence=1))
    open_run(api, job_id=job, fence=2)
    with pytest.raises(grpc.RpcError) as refused:
        open_run(api, job_id=job, fence=1)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert append(api, [old.batch(0, 10)]) == {old.id: 10}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: setattr(rows.blocks[0], "value", rows.blocks[0].value[:-8]),
        lambda rows: setattr(rows.blocks[0], "step", rows.blocks[0].step + b"\0" * 8),
        lambda rows: setattr(rows, "count", rows.count + 1),
        lambda rows: rows.blocks.add().CopyFrom(rows.blocks[0]),
        lambda rows: setattr(rows.blocks[0], "row", b"\0\0\0\0" * rows.count),
        lambda rows: rows.blocks[0].names.append(TRAIN_NAMES[0]),
    ],
    ids=["short column", "long column", "wrong count", "rows twice", "numbers twice", "name twice"],
)
def test_a_batch_that_contradicts_itself_is_refused_whole(api, spoil):
    writer = Writer(open_run(api))
    broken = writer.batch(0, 10)
    spoil(broken.rows)
    with pytest.raises(grpc.RpcError) as refused:
        append(api, [broken])
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert writer.position(api) == 0
    assert append(api, [writer.batch(0, 10)]) == {writer.id: 10}


@pytest.mark.parametrize("seed", [31])
def test_what_was_acknowledged_before_a_kill_is_there_after_it(yard, seed):
    rng = random.Random(seed)
    with Api(endpoint_of(yard), token(yard.folder)) as api:
        writer = Writer(open_run(api))
    rows = 0
    for _ in range(4):
        with Api(endpoint_of(yard), token(yard.folder)) as api:
            answers = api.metrics.Append(batches_from(writer, rows), **api.with_deadline)
            wanted = rows + rng.randint(1, 500)
            rows = next(answer.next_seq for answer in answers if answer.next_seq >= wanted)
            yard.kill()
        yard.up()
        with Api(endpoint_of(yard), token(yard.folder)) as api:
            assert writer.position(api) >= rows, f"seed {seed}"
            rows = writer.position(api)
            assert_stored_once(api, [writer], rows)


def batches_from(writer: Writer, first: int) -> Iterator[metrics_pb2.AppendRequest]:
    """More than the service will have taken when it is killed."""
    for start in range(first, first + 20_000, 10):
        yield writer.batch(start, start + 10)
