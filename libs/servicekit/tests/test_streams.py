"""Streams that are held open: how many there may be, and what becomes of those whose client stands still."""

import asyncio

import grpc
import pytest
from prometheus_client import CollectorRegistry
from servicekit import server as servers
from servicekit.auth import AttemptTokens, Authenticator, bearer_token
from servicekit.errors import reason_of
from servicekit.limits import StreamLimiter, Streams
from servicekit.slots import Slots
from trainyard.channel import connect
from trainyard.client.statuses import from_rpc
from trainyard.errors import NotRunning
from trainyard_protos.v1 import scheduler_pb2, scheduler_pb2_grpc


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Sends events for ever."""

    def __init__(self):
        self.open = 0
        self.closed = asyncio.Event()

    async def Watch(self, request, context):
        self.open += 1
        try:
            while True:
                yield scheduler_pb2.Event(message="x" * 100_000)
        finally:
            self.open -= 1
            self.closed.set()


@pytest.fixture
def scheduler():
    return Scheduler()


@pytest.fixture
async def serve(tmp_path, scheduler):
    """Starts a server with some limits; returns a stub of an attempt."""
    tokens, servers_started, channels = AttemptTokens.load_or_create(tmp_path), [], []

    async def start(**limits):
        server = servers.build(Authenticator(bearer_token(tmp_path), tokens), CollectorRegistry(), **limits)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
        port = servers.listen(server, "127.0.0.1", 0)
        await server.start()
        servers_started.append(server)

        def stub(attempt):
            token, _ = tokens.mint("default", "job", attempt, 1, 60)
            channels.append(connect(f"127.0.0.1:{port}", token))
            return scheduler_pb2_grpc.SchedulerServiceStub(channels[-1])

        return stub

    yield start
    for channel in channels:
        await channel.close()
    for server in servers_started:
        await server.stop(None)


async def test_a_caller_has_a_limited_number_of_streams_and_all_callers_together_too(serve):
    stub = await serve(streams=StreamLimiter({"Watch": Streams(of_caller=2, in_all=3)}))
    one, other = stub("one"), stub("other")
    request = scheduler_pb2.WatchRequest()
    calls = [one.Watch(request), one.Watch(request), other.Watch(request)]
    for call in calls:
        assert (await call.read()).message
    for caller, said in ((one, "attempt one has 2 streams of Watch open"), (other, "3 streams of Watch are open")):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await caller.Watch(request).read()
        error = refused.value
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TooManyStreams")
        assert said in error.details()


async def test_a_stream_that_ended_leaves_its_place(serve, scheduler):
    one = (await serve(streams=StreamLimiter({"Watch": Streams(of_caller=1, in_all=1)})))("one")
    call = one.Watch(scheduler_pb2.WatchRequest())
    assert (await call.read()).message
    call.cancel()
    await scheduler.closed.wait()
    assert (await one.Watch(scheduler_pb2.WatchRequest()).read()).message


async def test_a_stream_whose_client_stands_still_ends_and_the_client_is_told_that_it_was_cut(serve, scheduler):
    call = (await serve(stalled_s=0.2))("one").Watch(scheduler_pb2.WatchRequest())
    assert (await call.read()).message
    await scheduler.closed.wait()
    assert scheduler.open == 0
    with pytest.raises(grpc.aio.AioRpcError) as cut:
        while await call.read():
            pass
    assert isinstance(from_rpc(cut.value), NotRunning), cut.value.details()


class Stream:
    """A stream that holds something while it has a slot."""

    def __init__(self, slots):
        self._context = slots.slot()
        self.slot = self._context.__enter__()
        self.holds = False
        self.released = asyncio.Event()

    async def take(self):
        await self.slot.acquire()
        self.holds = True

    def wait_for_client(self):
        self.slot.idle(self._release)

    def _release(self):
        self.holds = False
        self.released.set()

    def end(self):
        self._context.__exit__(None, None, None)


async def test_a_stream_that_waits_for_its_client_gives_its_slot_to_one_that_needs_it_and_continues_later():
    slots = Slots(1, idle_s=3600)
    first, second = Stream(slots), Stream(slots)
    await first.take()
    first.wait_for_client()
    await second.take()
    assert (first.holds, second.holds) == (False, True)
    second.end()
    await first.take()
    assert first.holds


async def test_a_stream_keeps_its_slot_while_it_works():
    slots = Slots(1, idle_s=3600)
    first, second = Stream(slots), Stream(slots)
    await first.take()
    waiting = asyncio.create_task(second.take())
    await asyncio.sleep(0)
    assert (first.holds, waiting.done()) == (True, False)
    first.end()
    await waiting
    assert second.holds


async def test_a_stream_that_left_while_it_waited_takes_no_slot():
    slots = Slots(1, idle_s=3600)
    first, second, third = (Stream(slots) for _ in range(3))
    await first.take()
    waiting = asyncio.create_task(second.take())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    first.end()
    await third.take()
    assert third.holds


async def test_a_stream_whose_client_stands_still_loses_its_slot_also_when_no_other_needs_it():
    slots = Slots(2, idle_s=0.05)
    stream = Stream(slots)
    await stream.take()
    stream.wait_for_client()
    await stream.released.wait()
    assert not stream.holds
