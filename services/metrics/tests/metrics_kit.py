"""A real metrics ingestor behind a real server, and what tests send to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import uuid
from pathlib import Path

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from servicekit import server as servers
from servicekit.auth import AttemptTokens, Authenticator, bearer_token
from trainyard.channel import connect
from trainyard_metrics.app import Metrics
from trainyard_metrics.settings import Settings
from trainyard_protos.v1 import metrics_pb2 as pb
from trainyard_protos.v1.admin_pb2_grpc import MetricsAdminServiceStub
from trainyard_protos.v1.metrics_pb2_grpc import MetricsServiceStub


def run_id(number: int) -> str:
    """A fixed run id for each number."""
    return str(uuid.UUID(int=(7 << 76) | (2 << 62) | number))


class Ingestor:
    """The ingestor of one home, which can be stopped and started again, and its callers."""

    def __init__(self, home, database_url=None):
        self.home = home
        self._database_url = database_url or f"sqlite:///{home}/metrics.db"
        self.tokens = AttemptTokens.load_or_create(home)
        self._channels = []

    async def start(self, settings=None, **server):
        self.app = Metrics(home=self.home, database_url=self._database_url, settings=settings)
        self.calls = CollectorRegistry()
        self._server = servers.build(Authenticator(bearer_token(self.home), self.tokens), self.calls, **server)
        self.app.register(self._server)
        self._port = servers.listen(self._server, "127.0.0.1", 0)
        await self.app.start()
        await self._server.start()

    async def stop(self):
        for channel in self._channels:
            await channel.close()
        self._channels.clear()
        await self._server.stop(None)
        await self.app.stop()

    async def restart(self, **limits):
        await self.stop()
        await self.start(Settings(**limits))

    @property
    def endpoint(self):
        return f"127.0.0.1:{self._port}"

    def user(self):
        return self._stub(bearer_token(self.home))

    def admin(self):
        channel = connect(self.endpoint, bearer_token(self.home))
        self._channels.append(channel)
        return MetricsAdminServiceStub(channel)

    def attempt(self, number, *, job="job", fence=1, delivery=False, database=""):
        facts = ("default", job, run_id(number), fence)
        token, _ = self.tokens.mint(*facts, 60, delivery=delivery, database_id=database)
        return self._stub(token)

    def _stub(self, token):
        channel = connect(self.endpoint, token)
        self._channels.append(channel)
        return MetricsServiceStub(channel)

    def records(self, number):
        return self.home / "runs" / run_id(number) / "journal-00000000.log"

    def counted(self, name, **labels):
        return self.app.registry.get_sample_value(name, labels)


class Process:
    """The ingestor as a process that can be killed."""

    def __init__(self, home, **limits):
        self.home = home
        self.limits = json.dumps(limits)

    async def __aenter__(self):
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            Path(__file__).with_name("serve_metrics.py"),
            self.home,
            self.limits,
            stdout=asyncio.subprocess.PIPE,
        )
        self.port = int(await self._process.stdout.readline())
        self._channel = connect(f"127.0.0.1:{self.port}", bearer_token(self.home))
        self.stub = MetricsServiceStub(self._channel)
        return self

    async def __aexit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._channel.close()

    @property
    def pid(self):
        return self._process.pid

    def kill(self):
        self._process.kill()


async def open_run(stub, number=1, *, job="job", fence=1, **fields):
    run = pb.Run(id=run_id(number), job_id=job, fence=fence, **fields)
    return await stub.OpenRun(pb.OpenRunRequest(run=run))


def points(values, *, first=0, run=1, writer="w", name="loss", rank=0, first_step=None):
    """A batch of one series, whose steps are its record numbers."""
    size = len(values)
    start = first if first_step is None else first_step
    return pb.AppendRequest(
        run_id=run_id(run),
        writer_id=writer,
        first_seq=first,
        rows=pb.Rows(rank=rank, count=size, blocks=[block({name: values}, first_step=start)] if size else []),
    )


def block(series, *, first_step=0, row=None):
    """Rows of several series: their values by name. Times are 1000 ns after the steps."""
    steps = np.arange(first_step, first_step + len(next(iter(series.values()))), dtype="<i8")
    return pb.Block(
        names=list(series),
        row=b"" if row is None else np.asarray(row, "<u4").tobytes(),
        step=steps.tobytes(),
        time_ns=(steps + 1000).tobytes(),
        value=np.asarray(list(series.values()), "<f8").tobytes(),
    )


def lines(texts, *, first=0, run=1, writer="node-0", rank=0, first_time=None):
    """A batch of lines, one nanosecond apart."""
    start = first if first_time is None else first_time
    batch = pb.AppendRequest(run_id=run_id(run), writer_id=writer, first_seq=first)
    for index, text in enumerate(texts):
        batch.lines.lines.add(seq=first + index, time_ns=start + index, rank=rank, stream="output", text=text)
    return batch


async def append(stub, *batches):
    """The last acknowledged position of each writer, of batches sent on one stream."""

    async def requests():
        for batch in batches:
            yield batch

    positions = {}
    async for response in stub.Append(requests()):
        assert response.next_seq >= positions.get(response.writer_id, 0)
        positions[response.writer_id] = response.next_seq
    return positions


async def series(stub, job="job", **query):
    """Values by (name, rank) of a job."""
    selector = pb.SeriesSelector(
        job_id=job, names=query.pop("names", []), include_hidden=query.pop("include_hidden", False)
    )
    answer = await stub.QuerySeries(pb.QuerySeriesRequest(selector=selector, **query))
    return {(found.name, found.rank): found for found in answer.series}


async def texts(stub, job="job", **query):
    """Stored lines of a job."""
    request = pb.ReadLogsRequest(job_id=job, **query)
    return [stored.line.text async for page in stub.ReadLogs(request) for stored in page.lines]


async def refused(call):
    """The error of a call that has to fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value
