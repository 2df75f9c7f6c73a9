"""Readers that ask and then do not read: writers go on as before, and the service does not keep what they leave."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import grpc
import psutil
import pytest
from trainyard.home import token
from trainyard_protos.v1 import common_pb2, metrics_pb2

from tests.checker import Api
from tests.conftest import YardHome
from tests.faults.test_streams import Writer, append, assert_stored_once, open_run
from tests.faults.training import endpoint_of, memory_bytes, yard_process

READERS = 20
LINE_BYTES = 1000
LINES = 40_000
"""40 MB in all: more than any buffer on the way to a reader holds."""
LINES_PER_BATCH = 250
KEPT_FOR_A_READER = 32 * 2**20
"""A piece of one file, decoded, takes 5 MB: the rest is for what allocators keep."""
ALLOWED_GROWTH = 100 * 2**20
"""While readers that would be sent 800 MB do not read on."""


@pytest.fixture
def api(shared_yard: YardHome) -> Iterator[Api]:
    with Api(endpoint_of(shared_yard), token(shared_yard.folder)) as api:
        yield api


def lines(run_id: str, writer: str) -> Iterator[metrics_pb2.AppendRequest]:
    for first in range(0, LINES, LINES_PER_BATCH):
        texts = metrics_pb2.AppendRequest.Lines(
            lines=[
                common_pb2.LogLine(seq=number, time_ns=number + 1, text=f"{number:09} ".ljust(LINE_BYTES, "x"))
                for number in range(first, first + LINES_PER_BATCH)
            ]
        )
        yield metrics_pb2.AppendRequest(run_id=run_id, writer_id=writer, first_seq=first, lines=texts)


@pytest.fixture
def job(api: Api) -> str:
    """A job whose only run has very many lines."""
    job_id = str(uuid.uuid4())
    run_id = open_run(api, job_id=job_id, fence=1)
    for batch in lines(run_id, "output"):
        append(api, [batch])  # one by one, as an agent that has little to tell at a time
    return job_id


def test_readers_that_do_not_read_cost_neither_memory_nor_points(shared_yard, api, job):
    server: psutil.Process = yard_process(shared_yard)
    before = memory_bytes(server)
    with Api(endpoint_of(shared_yard), token(shared_yard.folder)) as lazy:
        logs = metrics_pb2.ReadLogsRequest(workspace="default", job_id=job)
        watch = metrics_pb2.WatchSeriesRequest(selector={"workspace": "default", "job_id": job})
        calls = [lazy.metrics.ReadLogs(logs, **lazy.with_deadline) for _ in range(READERS)]
        calls += [lazy.metrics.WatchSeries(watch, **lazy.with_deadline) for _ in range(READERS)]
        for call in calls[:READERS]:
            assert next(call).lines[0].line.text.startswith("000000000 "), "the reader is being served"
        served = memory_bytes(server)
        assert served - before < READERS * KEPT_FOR_A_READER, (
            f"{(served - before) / 2**20:.0f} MB for {READERS} readers"
        )
        writer = Writer(open_run(api, job_id=job, fence=2))
        rows = 5000
        append(api, (writer.batch(first, first + 50) for first in range(0, rows, 50)))
        assert_stored_once(api, [writer], rows)
        grown = memory_bytes(server) - served
        assert grown < ALLOWED_GROWTH, f"{grown / 2**20:.0f} MB more in memory"
        assert all(call.is_active() for call in calls), "nobody was thrown out for being slow"


def test_a_reader_that_was_slow_still_gets_every_line(api, job):
    answers = api.metrics.ReadLogs(metrics_pb2.ReadLogsRequest(workspace="default", job_id=job), **api.with_deadline)
    first = next(answers)
    open_run(api)  # something else is asked for and answered meanwhile
    numbers = [int(stored.line.text[:9]) for page in (first, *answers) for stored in page.lines]
    assert numbers == list(range(LINES))
    assert answers.code() is grpc.StatusCode.OK
