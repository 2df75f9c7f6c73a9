"""What trackers wrote arrives once, whatever happens on its way; against a real metrics service."""

import asyncio
import json
import os
import struct
import subprocess
import sys
import textwrap
import uuid
from collections import Counter
from contextlib import asynccontextmanager

import grpc
import pytest
from agent_yard import Yard
from servicekit.auth import bearer_token
from trainyard.agent import window as windows
from trainyard.agent.link import Link
from trainyard.agent.shipper import Shipper
from trainyard.agent.sources import SampleSource
from trainyard.agent.tracked import DROPPED, Tracked
from trainyard.home import YardFile, boot_id, process_start_time, write_endpoint
from trainyard.tracker import records
from trainyard.tracker.writing import Log
from trainyard_protos.v1 import metrics_pb2, metrics_pb2_grpc

from scripts.testbed.patience import PATIENCE_S


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "tracker"
    folder.mkdir()
    monkeypatch.setenv("TRAINYARD_TRACKER_DIR", str(folder))
    monkeypatch.setattr(records, "FIRST_SIZE", 4096)
    return folder


class Shipping:
    """A shipper of everything in a folder, to a run of its own."""

    def __init__(self, yard, folder, run_id="", more=()):
        self.run_id = run_id or str(uuid.uuid4())
        self.tracked = Tracked(folder)
        self.complaints = []
        link = Link(token=bearer_token(yard.home), endpoint=yard.endpoint)
        run = metrics_pb2.Run(id=self.run_id, name="test")
        self.shipper = Shipper(link, run, lambda: [*self.tracked.sources, *more], self.complaints.append)
        self.task = asyncio.create_task(self.shipper.run())

    def look(self):
        while self.tracked.look():
            self.shipper.wake()

    async def finish(self):
        self.look()
        async with asyncio.timeout(PATIENCE_S):
            await self.shipper.finish(self.task)

    async def acknowledged(self, row):
        """Waits until metrics has everything below that number, of every writer."""
        async with asyncio.timeout(PATIENCE_S):
            while not all(log.source.acknowledged >= row for log in self.tracked.logs):
                await asyncio.sleep(0.01)


async def stored(yard, run_id):
    """Every stored series: (name, rank) -> steps and values."""
    async with yard.metrics_stub() as stub:
        selector = metrics_pb2.SeriesSelector(workspace="default", run_id=run_id)
        answer = await stub.QuerySeries(metrics_pb2.QuerySeriesRequest(selector=selector))
    return {(series.name, series.rank): (list(series.step), list(series.value)) for series in answer.series}


def write(log, first, count, names=("loss", "acc")):
    for step in range(first, first + count):
        log.row(names, step, step, [float(step + place) for place in range(len(names))])


def expected(count, names=("loss", "acc")):
    return {
        (name, 0): (list(range(count)), [float(step + place) for step in range(count)])
        for place, name in enumerate(names)
    }


async def test_rows_arrive_once_and_in_order(yard, folder):
    log = Log()
    write(log, 0, 3_000)
    shipping = Shipping(yard, folder)
    await shipping.finish()
    assert await stored(yard, shipping.run_id) == expected(3_000)


async def test_metrics_may_go_away_and_come_back_as_often_as_it_likes(yard, folder):
    log = Log()
    shipping = Shipping(yard, folder)
    for round in range(4):
        write(log, round * 1_000, 500)
        shipping.look()
        if round % 2:
            await shipping.acknowledged(round * 1_000 + 100)
        await yard.stop()
        write(log, round * 1_000 + 500, 500)
        shipping.look()
        await yard.start()
    await shipping.finish()
    assert await stored(yard, shipping.run_id) == expected(4_000)


async def test_what_is_sent_again_after_its_acknowledgement_was_lost_is_stored_once(yard, folder):
    log = Log()
    write(log, 0, 1_000)
    first = Shipping(yard, folder)
    await first.finish()
    write(log, 1_000, 10)
    again = Shipping(yard, folder, run_id=first.run_id)
    await again.finish()
    assert await stored(yard, first.run_id) == expected(1_010)


async def test_shapes_that_take_turns_keep_the_order_of_their_rows(yard, folder):
    log = Log()
    for step in range(2_000):
        log.row((("train/loss", "lr"), ("val/loss",))[step % 2], step, step, [step, step][: 2 - step % 2])
    shipping = Shipping(yard, folder)
    await shipping.finish()
    even, odd = list(range(0, 2_000, 2)), list(range(1, 2_000, 2))
    assert await stored(yard, shipping.run_id) == {
        ("train/loss", 0): (even, even),
        ("lr", 0): (even, even),
        ("val/loss", 0): (odd, odd),
    }


async def test_rows_of_more_series_than_a_batch_may_have_go_in_several(yard, folder):
    log = Log()
    for step in range(150):
        log.row(tuple(f"{step}/{place}" for place in range(128)), step, step, [1.0] * 128)
    log.close()
    shipping = Shipping(yard, folder)
    await shipping.finish()
    assert shipping.complaints == []
    found = await stored(yard, shipping.run_id)
    assert sum(len(steps) for steps, _ in found.values()) == 150 * 128
    assert len(found) == 10_001  # those beyond the limit of a run are kept under one name


async def test_values_that_are_not_finite_arrive_bit_by_bit(yard, folder):
    bits = [0x7FF8_0000_0000_0001, 0xFFF8_DEAD_BEEF_0000, 0x7FF0_0000_0000_0000, 0xFFF0_0000_0000_0000, 1 << 63]
    log = Log()
    for value in struct.unpack("<5d", struct.pack("<5Q", *bits)):
        log.row(("loss",), 0, 0, (value,))
    shipping = Shipping(yard, folder)
    await shipping.finish()
    _, values = (await stored(yard, shipping.run_id))["loss", 0]
    assert list(struct.unpack("<5Q", struct.pack("<5d", *values))) == bits


async def test_acknowledged_segments_leave_the_disk_while_the_writer_goes_on(yard, folder):
    log = Log()
    shipping = Shipping(yard, folder)
    most = 0
    for round in range(20):
        write(log, round * 500, 500)
        shipping.look()
        await shipping.acknowledged(round * 500 + 500)
        shipping.look()
        most = max(most, len(list(folder.iterdir())))
    await shipping.finish()
    assert await stored(yard, shipping.run_id) == expected(10_000)
    assert most <= 2


async def test_one_log_whose_rows_are_gone_does_not_hold_up_the_others(yard, folder, tmp_path):
    lost = Log()
    write(lost, 0, 500)
    shipping = Shipping(yard, folder)
    await shipping.finish()
    shipping.look()
    other = Log()
    write(other, 0, 10, names=("other",))
    empty = Yard(tmp_path / "restored")  # metrics, as it was before all this
    await empty.start()
    try:
        again = Shipping(empty, folder)
        await again.finish()
        assert await stored(empty, again.run_id) == expected(10, names=("other",))
        assert list(again.shipper.missing) == [str(lost.writer_id)]
        assert len(again.complaints) == 1 and "had acknowledged all below" in again.complaints[0]
    finally:
        await empty.stop()


async def test_rows_that_were_dropped_are_a_series_of_the_run(yard, folder):
    log = Log()
    write(log, 0, 3)
    for _ in range(7):
        log.drop()
    shipping = Shipping(yard, folder)
    await shipping.finish()
    assert (await stored(yard, shipping.run_id))[DROPPED, 0] == ([2], [7.0])


async def test_samples_of_different_names_are_rows_of_one_writer(yard, folder):
    samples = SampleSource("samples", rank=2)
    for step in range(10):
        samples.add([("system/cpu", step), ("system/memory_bytes", 2 * step)], time_ns=step, step=step)
        samples.add([("system/gpu0", 3 * step)], time_ns=step, step=step)
    shipping = Shipping(yard, folder, more=[samples])
    await shipping.finish()
    steps = list(range(10))
    assert await stored(yard, shipping.run_id) == {
        ("system/cpu", 2): (steps, steps),
        ("system/memory_bytes", 2): (steps, [2 * step for step in steps]),
        ("system/gpu0", 2): (steps, [3 * step for step in steps]),
    }


class Deaf(metrics_pb2_grpc.MetricsServiceServicer):
    """Takes batches and acknowledges nothing until it is told to."""

    def __init__(self):
        self.bytes = 0
        self.hear = asyncio.Event()
        self.batches = Counter()

    async def OpenRun(self, request, context):
        return request.run

    async def GetPosition(self, request, context):
        return metrics_pb2.GetPositionResponse()

    async def Append(self, requests, context):
        async for request in requests:
            self.bytes += request.ByteSize()
            self.batches[request.writer_id] += 1
            await self.hear.wait()
            end = request.first_seq + request.rows.count
            yield metrics_pb2.AppendResponse(run_id=request.run_id, writer_id=request.writer_id, next_seq=end)


@asynccontextmanager
async def deaf_service():
    server = grpc.aio.server()
    deaf = Deaf()
    metrics_pb2_grpc.add_MetricsServiceServicer_to_server(deaf, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield deaf, port
    finally:
        await server.stop(0)


async def test_what_is_under_way_is_bounded_and_no_writer_waits_for_another(folder, monkeypatch):
    logs = [Log() for _ in range(3)]
    for log in logs:
        write(log, 0, 500, names=tuple(f"name{number}" for number in range(400)))
    tracked = Tracked(folder)
    tracked.look()
    sent = []
    send = windows.Window.sent
    monkeypatch.setattr(
        windows.Window, "sent", lambda self, source, batch: (send(self, source, batch), sent.append(self._bytes))
    )
    async with deaf_service() as (deaf, port):
        shipper = Shipper(
            Link(token="", endpoint=f"127.0.0.1:{port}"), metrics_pb2.Run(id="x"), lambda: tracked.sources, print
        )
        task = asyncio.create_task(shipper.run())
        async with asyncio.timeout(PATIENCE_S):
            while not sent or sent[-1] < windows.MAX_BYTES:
                await asyncio.sleep(0.01)
        deaf.hear.set()
        async with asyncio.timeout(PATIENCE_S):
            await shipper.finish(task)
    assert max(sent) < windows.MAX_BYTES + 256 * 1024
    assert len(set(deaf.batches.values())) == 1  # as many batches of each


# Plain scripts


@pytest.fixture
def script(yard, tmp_path):
    """Runs a plain script beside a yard that is up: `script(code)`."""
    write_endpoint(
        yard.home, YardFile(yard.endpoint, os.getpid(), process_start_time(os.getpid()) or 0, boot_id(), "0", False)
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRAINYARD_TRACKER_DIR"}

    async def run(code, shell='exec "$PYTHON" script.py'):
        (tmp_path / "script.py").write_text(textwrap.dedent(code))
        settings = {"TRAINYARD_HOME": str(yard.home), "PYTHON": sys.executable}
        process = await asyncio.create_subprocess_exec("sh", "-c", shell, env=environment | settings, cwd=tmp_path)
        await process.wait()
        return process.returncode

    return run


async def delivered(yard):
    """The runs, when everything is delivered."""
    async with asyncio.timeout(PATIENCE_S):
        while any((yard.home / "offline").iterdir()):
            await asyncio.sleep(0.05)
    async with yard.metrics_stub() as stub:
        return list((await stub.ListRuns(metrics_pb2.ListRunsRequest(workspace="default"))).runs)


async def test_what_a_script_logged_before_it_was_killed_arrives(yard, script):
    code = """
        import os, signal
        from trainyard import tracker
        for step in range(5_000): tracker.log({"loss": step, "acc": step + 1}, step=step)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    await script(code)
    [run] = await delivered(yard)
    assert await stored(yard, run.id) == expected(5_000)


async def test_a_script_may_name_and_describe_its_run(yard, script, tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    code = """
        from trainyard import tracker
        tracker.init("first try", params={"lr": 0.1}, tags={"team": "vision"})
        tracker.log({"loss": 1.0})
    """
    await script(code)
    [run] = await delivered(yard)
    assert (run.name, json.loads(run.params), dict(run.tags)) == ("first try", {"lr": 0.1}, {"team": "vision"})
    context = json.loads(run.context)
    assert context["argv"] == ["script.py"] and "script.py" in context["git"]["untracked"]


async def test_processes_of_one_torchrun_make_one_run(yard, script):
    code = """
        import os
        from trainyard import tracker
        tracker.log({"loss": int(os.environ["RANK"])}, step=0)
    """
    ranks = 'export TORCHELASTIC_RUN_ID=x; for RANK in 0 1 2; do RANK=$RANK "$PYTHON" script.py & done; wait'
    await script(code, shell=ranks)
    [run] = await delivered(yard)
    assert await stored(yard, run.id) == {("loss", rank): ([0], [rank]) for rank in range(3)}


async def test_a_run_is_not_over_before_the_last_of_its_writers(yard, script, tmp_path):
    os.mkfifo(tmp_path / "gate")
    code = """
        import os
        from trainyard import tracker
        tracker.log({"loss": 0}, step=0)
        if os.fork() == 0:
            tracker.log({"late": 1}, step=1)
            open("gate").read()
            for step in range(2, 3_000): tracker.log({"late": step}, step=step)
    """
    await script(code)
    with (tmp_path / "gate").open("w"):
        [folder] = (yard.home / "offline").iterdir()
        assert folder.exists()
    [run] = await delivered(yard)
    steps = list(range(1, 3_000))
    assert (await stored(yard, run.id))["late", 0] == (steps, steps)


async def test_a_shipper_stays_small_however_much_there_is_to_ship(yard, folder, monkeypatch, tmp_path):
    offline = yard.home / "offline" / str(uuid.uuid4())
    offline.mkdir(parents=True)
    monkeypatch.setenv("TRAINYARD_TRACKER_DIR", str(offline))
    names = tuple(f"name{number}" for number in range(500))
    log = Log()
    for step in range(20_000):  # 80 MB
        log.row(names, step, step, [float(step)] * 500)
    owner = {"pid": 0, "start_time": 0, "boot_id": "before", "created_ns": 0, "name": "big", "id": offline.name}
    (offline / "run.json").write_text(json.dumps(owner | {"context": {"argv": ["x"], "cwd": str(tmp_path)}}))
    write_endpoint(yard.home, YardFile(yard.endpoint, os.getpid(), 1, boot_id(), "0", False))
    code = (
        "import sys; from trainyard.agent.ship import main; assert main(sys.argv) == 0;"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    command = [sys.executable, "-c", code, str(offline)]
    done = await asyncio.to_thread(subprocess.run, command, check=True, stdout=subprocess.PIPE)
    assert not offline.exists()
    assert int(done.stdout) <= 56 * 1024  # KiB: libraries of some 40 MiB, and what is under way
    async with yard.metrics_stub() as stub:
        selector = metrics_pb2.SeriesSelector(workspace="default", run_id=offline.name)
        series = (await stub.ListSeries(metrics_pb2.ListSeriesRequest(selector=selector))).series
    assert {each.count for each in series} == {20_000} and len(series) == 500


@pytest.mark.parametrize("reconnect", [False, True])
async def test_facts_that_metrics_refuses_cost_no_rows(yard, folder, reconnect):
    log = Log()
    write(log, 0, 500)
    shipping = Shipping(yard, folder)
    if reconnect:
        shipping.look()
        await shipping.acknowledged(500)
        await yard.stop()
    shipping.shipper.update(lambda run: setattr(run, "params", json.dumps({"huge": "x" * 2_000_000})))
    if reconnect:
        await yard.start()
    write(log, 500, 500)
    await shipping.finish()
    assert not shipping.shipper.refused
    assert len(shipping.complaints) == 1
    assert await stored(yard, shipping.run_id) == expected(1_000)
