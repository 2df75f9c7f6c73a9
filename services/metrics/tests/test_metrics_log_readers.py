"""Readers of lines that stand still cost the service a bounded amount and keep nobody out; slow ones get every line."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import psutil
from servicekit.auth import bearer_token
from trainyard.client.aio import AsyncClient
from trainyard.client.runs import Subject
from trainyard_metrics.settings import Settings
from trainyard_protos.v1 import metrics_pb2 as pb
from trainyard_protos.v1.metrics_pb2_grpc import MetricsServiceStub

from services.metrics.tests.metrics_kit import Ingestor, Process, append, lines, open_run, run_id, texts

STALLED = 200
LINES = 4_000
LINE = "x" * 1000
ALLOWED_BYTES = 250 * 2**20
"""What 200 readers may hold together. They held 640 MB and 800 descriptors when each kept what it was reading."""
ALLOWED_DESCRIPTORS = 100
ALL = pb.ReadLogsRequest(job_id="job")


async def write(stub, count=LINES, text=LINE):
    for first in range(0, count, 100):
        await append(stub, lines([f"{number} {text}" for number in range(first, first + 100)], first=first))


async def compacted(home):
    """Waits until the older lines of the run are in column files."""
    while not list((home / "runs" / run_id(1)).glob("lines-*.parquet")):
        await asyncio.sleep(0.05)


def numbers(pages):
    return [int(stored.line.text.split()[0]) for page in pages for stored in page.lines]


@asynccontextmanager
async def lazy_readers(service):
    """Begins reads on a channel that takes 64 KiB of what is not read, not some MiB."""
    metadata = [("authorization", f"Bearer {bearer_token(service.home)}")]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}", [("grpc.http2.bdp_probe", 0)]) as channel:
        yield lambda request=ALL: MetricsServiceStub(channel).ReadLogs(request, metadata=metadata)


async def rest_of(call):
    pages = []
    while (page := await call.read()) is not grpc.aio.EOF:
        pages.append(page)
    return pages


async def test_two_hundred_readers_that_stand_still_hold_little_and_all_others_are_served(tmp_path):
    (tmp_path / "home").mkdir()
    # Segments are small, so that a few lines are enough.
    async with Process(tmp_path / "home", max_segment_bytes=2**21) as service, lazy_readers(service) as read:
        await open_run(service.stub)
        await write(service.stub)
        await compacted(tmp_path / "home")
        assert numbers([await read().read()])[0] == 0
        process = psutil.Process(service.pid)
        before, descriptors = process.memory_info().rss, process.num_fds()

        stalled = [read() for _ in range(STALLED)]
        firsts = [await call.read() for call in stalled]

        assert process.memory_info().rss - before < ALLOWED_BYTES
        assert process.num_fds() - descriptors < ALLOWED_DESCRIPTORS
        assert await texts(service.stub, tail=1) == [f"{LINES - 1} {LINE}"]
        assert await append(service.stub, lines(["another"], first=LINES)) == {"node-0": LINES + 1}
        late = await rest_of(stalled[0])
        assert numbers([firsts[0], *late]) == list(range(LINES)), "every line once, of those that were there at first"


async def test_a_client_that_was_cut_off_while_it_stood_still_gets_every_line_once(tmp_path):
    ingestor = Ingestor(tmp_path / "home")
    await ingestor.start(Settings(max_log_readers=1), stalled_s=0.2)
    await open_run(ingestor.user())
    count, text = 1000, "x" * 16_000  # more than the connection takes while the client reads nothing
    await write(ingestor.user(), count, text)
    async with AsyncClient(ingestor.endpoint, token=bearer_token(ingestor.home)) as client:
        read = client.logs(Subject(job_id="job"))
        first = await anext(read)
        labels = {"method": "/trainyard.v1.MetricsService/ReadLogs", "code": "UNAVAILABLE"}
        while not ingestor.calls.get_sample_value("trainyard_grpc_calls_total", labels):
            await asyncio.sleep(0.02)
        assert await texts(ingestor.user(), tail=1) == [f"{count - 1} {text}"]
        rest = [stored async for stored in read]
    assert [int(stored.line.text.split()[0]) for stored in [first, *rest]] == list(range(count))
    await ingestor.stop()
