"""Limits of the chart's gateway: a real nginx with the configuration of the chart, in front of real services."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from blake3 import blake3
from google.protobuf.descriptor import MethodDescriptor
from servicekit import server as servers
from servicekit.errors import PROBLEMS_KEY, reason_of
from servicekit.requests import DEFAULT_LIMIT, REQUEST_LIMITS
from trainyard.client.statuses import from_rpc
from trainyard_protos.v1 import admin_pb2, artifacts_pb2, launcher_pb2, metrics_pb2, scheduler_pb2, yard_pb2
from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceStub
from trainyard_protos.v1.metrics_pb2_grpc import MetricsServiceStub
from trainyard_protos.v1.scheduler_pb2_grpc import SchedulerServiceStub

from services.scheduler.tests.yard import document
from tests.cluster.gateway import (
    HEADERS,
    MAX_CONCURRENT_STREAMS,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    Gateway,
    Services,
    configuration,
    frame,
    from_address,
    limit_of,
    settings,
    tcp,
)
from tests.conftest import wait_until

WATCH = "/trainyard.v1.SchedulerService/Watch"
OTHER_ADDRESS = "127.0.0.2"
FEW = {
    "callsPerConnection": 4,
    "callsPerAddress": 6,
    "callRate": 1,
    "callBurst": 50,
    "headerTimeout": "1s",
    "idleTimeout": "1s",
}
"""Limits in place of the defaults where reaching those would take thousands of TLS handshakes, or ten minutes."""


class Yard:
    """A gateway and what is behind it."""

    def __init__(self, gateway: Gateway, token: str, stack: AsyncExitStack) -> None:
        self.gateway = gateway
        self.token = token
        self._stack = stack

    async def channel(self, source: str = "", token: str = "") -> grpc.aio.Channel:
        """A connection of a client, from another address of this machine when one is given."""
        endpoint = await self._stack.enter_async_context(from_address(source, self.gateway.port)) if source else ""
        channel = self.gateway.channel(token or self.token, endpoint)
        self._stack.push_async_callback(channel.close)
        return channel

    async def scheduler(self, source: str = "", token: str = "") -> SchedulerServiceStub:
        return SchedulerServiceStub(await self.channel(source, token))

    async def serves(self) -> None:
        """Asserts that a client is served."""
        assert not (await (await self.scheduler()).ListPools(scheduler_pb2.ListPoolsRequest())).pools


@asynccontextmanager
async def running(folder: Path, **limits: object) -> AsyncIterator[Yard]:
    services = Services(folder)
    async with services.serving() as ports, AsyncExitStack() as stack:
        gateway = Gateway(folder, ports, limits)
        await asyncio.to_thread(gateway.start)
        stack.callback(gateway.stop)
        yield Yard(gateway, services.token, stack)


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    """With the chart's defaults."""
    async with running(tmp_path) as found:
        yield found


@pytest.fixture
async def small_yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with running(tmp_path, **FEW) as found:
        yield found


async def refused(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value


class Stream:
    """A stream of events that is open: the first one has come."""

    def __init__(self, call: AsyncIterator[scheduler_pb2.Event]) -> None:
        self._call = call

    async def brings(self, name: str) -> None:
        """Waits for an event of a job."""
        async for event in self._call:
            if event.object_name == name:
                return
        raise AssertionError("the stream ended")


async def submit(yard: Yard, name: str) -> None:
    request = scheduler_pb2.SubmitRequest(document=scheduler_pb2.Document(text=document(name), filename="job.yaml"))
    await (await yard.scheduler()).Submit(request)


async def opened(yard: Yard, count: int = 1, source: str = "") -> list[Stream]:
    """Streams that are open, two on each connection."""
    await submit(yard, "before")
    stubs = [await yard.scheduler(source) for _ in range((count + 1) // 2)]
    streams = [Stream(aiter(stubs[number // 2].Watch(scheduler_pb2.WatchRequest()))) for number in range(count)]
    for stream in streams:
        await stream.brings("before")
    return streams


async def test_headers_larger_than_any_token_end_their_connection(yard: Yard) -> None:
    [stream] = await opened(yard)
    other = await yard.scheduler(OTHER_ADDRESS)
    error = await refused(other.ListPools(scheduler_pb2.ListPoolsRequest(), metadata=(("x-filling", "x" * 20_000),)))
    assert "Error code: 11" in error.debug_error_string()  # ENHANCE_YOUR_CALM
    await submit(yard, "after")
    await stream.brings("after")


async def test_the_gateway_refuses_a_request_above_the_limit_of_its_method(yard: Yard) -> None:
    stub = await yard.scheduler()
    error = await refused(stub.GetJob(scheduler_pb2.GetJobRequest(id="x" * 2 * DEFAULT_LIMIT.size)))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "RequestTooLarge")
    assert "larger than this method accepts" in (error.details() or "")
    await yard.serves()


async def test_requests_up_to_the_limit_of_their_method_reach_the_service(yard: Yard) -> None:
    """And its errors come back complete, even when they list hundreds of kilobytes of problems."""
    wrong = "".join(f"  wrong-{number}: {'x' * 200}\n" for number in range(3_000))
    text = f"apiVersion: trainyard.dev/v1alpha1\nkind: TrainingJob\nmetadata: {{name: a}}\nspec:\n{wrong}"
    assert len(text) > 2 * DEFAULT_LIMIT.size
    request = scheduler_pb2.SubmitRequest(document=scheduler_pb2.Document(text=text, filename="job.yaml"))
    error = await refused((await yard.scheduler()).Submit(request))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(error) != "RequestTooLarge"
    problems = dict(error.trailing_metadata() or ())[PROBLEMS_KEY]
    assert len(problems) > 2**17


async def test_connections_above_the_limit_of_an_address_are_refused_and_other_clients_are_served(yard: Yard) -> None:
    [stream] = await opened(yard)
    wires = [tcp(yard.gateway.port, OTHER_ADDRESS) for _ in range(1024 + 50)]
    try:
        for wire in wires:
            wire.setblocking(False)

        def closed() -> list[int]:
            return [wire.fileno() for wire in wires if _is_closed(wire)]

        await asyncio.to_thread(wait_until, lambda: len(closed()) == 50, "50 connections to be refused")
        await yard.serves()
        assert await yard.gateway.probe() == "HTTP/1.1 200 OK"
        error = await refused(
            (await yard.scheduler(OTHER_ADDRESS)).ListPools(scheduler_pb2.ListPoolsRequest(), wait_for_ready=False)
        )
        assert error.code() == grpc.StatusCode.UNAVAILABLE
    finally:
        for wire in wires:
            wire.close()
    await (await yard.scheduler(OTHER_ADDRESS)).ListPools(scheduler_pb2.ListPoolsRequest(), wait_for_ready=True)
    await submit(yard, "after")
    await stream.brings("after")


def _is_closed(wire: object) -> bool:
    try:
        return wire.recv(1) == b""  # type: ignore[attr-defined]
    except BlockingIOError:
        return False
    except OSError:
        return True


async def test_a_connection_has_a_bounded_number_of_calls(yard: Yard) -> None:
    wire = await yard.gateway.dial(OTHER_ADDRESS)
    _, content = await wire.receive(SETTINGS)
    assert settings(content)[MAX_CONCURRENT_STREAMS] == 1024
    await wire.close()


async def test_calls_above_the_limit_of_their_connection_are_refused(small_yard: Yard) -> None:
    wire = await small_yard.gateway.dial(OTHER_ADDRESS)
    for number in (1, 3, 5, 7, 9):
        wire.call(number, WATCH, small_yard.token)
    number, content = await wire.receive(RST_STREAM)
    assert (number, int.from_bytes(content)) == (9, REFUSED_STREAM)
    await small_yard.serves()
    await wire.close()


async def test_calls_above_the_limit_of_their_address_are_refused_and_other_clients_are_served(
    small_yard: Yard,
) -> None:
    streams = await opened(small_yard, 6, OTHER_ADDRESS)
    error = await refused((await small_yard.scheduler(OTHER_ADDRESS)).ListPools(scheduler_pb2.ListPoolsRequest()))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "TooManyCalls")
    assert "6 at once" in (error.details() or "")
    assert "gateway.limits" in from_rpc(error).hint
    await submit(small_yard, "after")
    for stream in streams:
        await stream.brings("after")


async def test_a_flood_of_calls_with_a_wrong_token_is_limited_and_other_clients_are_served(small_yard: Yard) -> None:
    other = await small_yard.scheduler(OTHER_ADDRESS, "nonsense")

    async def called() -> str:
        error = await refused(other.ListPools(scheduler_pb2.ListPoolsRequest()))
        return reason_of(error)

    reasons = await asyncio.gather(*(called() for _ in range(200)))
    assert set(reasons) == {"TooManyCalls", "BadToken"}
    await small_yard.serves()


async def test_slow_headers_end_their_call_and_idle_connections_are_closed_but_silent_streams_stay_open(
    small_yard: Yard,
) -> None:
    [stream] = await opened(small_yard)
    mute = await asyncio.open_connection("127.0.0.1", small_yard.gateway.port, local_addr=(OTHER_ADDRESS, 0))
    slow = await small_yard.gateway.dial(OTHER_ADDRESS)
    idle = await small_yard.gateway.dial(OTHER_ADDRESS)
    slow.send(frame(HEADERS, 1, b"x" * 200)[:20])

    async def trickle() -> None:
        while True:
            slow.send(b"x")
            await asyncio.sleep(0.2)

    trickling = asyncio.create_task(trickle())
    number, _ = await slow.receive(RST_STREAM)
    assert number == 1
    trickling.cancel()
    assert await mute[0].read() == b""
    await asyncio.gather(slow.closed(), idle.closed())
    await small_yard.serves()
    await submit(small_yard, "after")
    await stream.brings("after")
    mute[1].close()


async def test_a_stream_may_be_silent_and_carry_more_than_any_request(small_yard: Yard) -> None:
    chunks = [random.Random(number).randbytes(2**20) for number in range(20)]
    stub = ArtifactServiceStub(await small_yard.channel())

    async def messages() -> AsyncIterator[artifacts_pb2.Chunk]:
        for number, data in enumerate(chunks):
            if number == 10:  # longer than any timeout of the gateway
                await (await small_yard.gateway.dial(OTHER_ADDRESS)).closed()
            yield artifacts_pb2.Chunk(workspace="default", hash=blake3(data).digest(), data=data)

    answer = await stub.PutChunks(messages())
    assert answer.bytes == sum(map(len, chunks)) > max(each.size for each in REQUEST_LIMITS.values())


async def test_the_error_for_an_unreachable_service_names_it(yard: Yard) -> None:
    error = await refused(MetricsServiceStub(await yard.channel()).ListRuns(metrics_pb2.ListRunsRequest()))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "ServiceUnavailable")
    assert "the yard's metrics service is not reachable" in (error.details() or "")
    assert "try again" in from_rpc(error).hint


def methods() -> list[MethodDescriptor]:
    modules = (admin_pb2, artifacts_pb2, launcher_pb2, metrics_pb2, scheduler_pb2, yard_pb2)
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    return [method for service in services for method in service.methods]


@pytest.mark.parametrize("method", methods(), ids=lambda method: method.full_name.removeprefix("trainyard.v1."))
def test_the_gateway_and_the_service_accept_requests_of_the_same_size(method: MethodDescriptor) -> None:
    service, _, name = method.full_name.rpartition(".")
    path = f"/{service}/{name}"
    size, silence = limit_of(configuration(), path)
    if method.client_streaming:
        assert (size, silence) == (0, "365d")
    else:
        assert size == REQUEST_LIMITS.get(path, DEFAULT_LIMIT).size + 5  # gRPC's prefix
        assert silence == "1m"


def test_connections_to_services_are_closed_here_before_a_service_closes_them() -> None:
    assert configuration().count("keepalive_timeout 60s;") == 4
    assert servers._CONNECTION_IDLE_MS > 60_000
