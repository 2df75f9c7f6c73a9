import asyncio

import grpc
import pytest
from prometheus_client import CollectorRegistry
from servicekit import server as servers
from servicekit.auth import AttemptTokens, Authenticator
from trainyard.channel import connect
from trainyard_embedded.late import LateServices
from trainyard_protos.v1 import yard_pb2, yard_pb2_grpc


class Yard(yard_pb2_grpc.YardServiceServicer):
    async def Info(self, request, context):
        return yard_pb2.InfoResponse(version="1")


@pytest.fixture
async def late_server(tmp_path):
    late = LateServices(["trainyard.v1.YardService"])
    server = servers.build(Authenticator("t", AttemptTokens.load_or_create(tmp_path)), CollectorRegistry(), [late])
    port = servers.listen(server, "127.0.0.1", 0)
    await server.start()
    async with connect(f"127.0.0.1:{port}", "t") as channel:
        yield late, server, yard_pb2_grpc.YardServiceStub(channel)
    await server.stop(None)


async def test_a_call_waits_for_a_service_that_is_registered_after_the_server_started(late_server):
    late, server, stub = late_server
    call = asyncio.ensure_future(stub.Info(yard_pb2.InfoRequest()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Info(yard_pb2.InfoRequest(), timeout=0.05)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    yard_pb2_grpc.add_YardServiceServicer_to_server(Yard(), server)
    late.open("trainyard.v1.YardService")
    assert (await call).version == "1"
    assert (await stub.Info(yard_pb2.InfoRequest())).version == "1"


async def test_calls_fail_when_the_service_does_not_come(late_server):
    late, _, stub = late_server
    call = asyncio.ensure_future(stub.Info(yard_pb2.InfoRequest()))
    await asyncio.sleep(0)
    late.fail()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
