"""Connections that nobody uses keep no caller out."""

import resource
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest
from servicekit.auth import bearer_token
from trainyard.channel import connect
from trainyard_protos.v1 import yard_pb2, yard_pb2_grpc

from scripts.testbed.patience import PATIENCE_S

IDLE = 1100
SOFT = 1024

SERVICE = """
import asyncio, sys
from pathlib import Path
from servicekit.auth import AttemptTokens, bearer_token
from servicekit.host import Host
from trainyard_protos.v1 import yard_pb2, yard_pb2_grpc

class Yard(yard_pb2_grpc.YardServiceServicer):
    async def Info(self, request, context):
        return yard_pb2.InfoResponse(version="here")

async def serve(home):
    host = Host([], home, bearer_token(home), AttemptTokens.load_or_create(home))
    yard_pb2_grpc.add_YardServiceServicer_to_server(Yard(), host.server)
    print(host.listen("127.0.0.1", 0), flush=True)
    await host.server.start()
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(serve(Path(sys.argv[1])))
"""


@pytest.fixture
def port(tmp_path):
    """Of a service that was started with the usual limit of descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * IDLE + 200:
        pytest.skip(f"this machine allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, hard))
    try:
        command = [sys.executable, "-c", SERVICE, str(tmp_path)]
        service = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * IDLE), hard))
    yield int(service.stdout.readline())
    service.communicate(timeout=PATIENCE_S)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_idle(stack, port):
    return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))


async def test_a_thousand_idle_connections_keep_no_caller_out(port, tmp_path):
    with ExitStack() as stack:
        idle = [open_idle(stack, port) for _ in range(IDLE)]
        for connection in idle:  # each is being served: the server has sent its settings
            assert connection.recv(1)
        async with connect(f"127.0.0.1:{port}", bearer_token(tmp_path)) as channel:
            info = await yard_pb2_grpc.YardServiceStub(channel).Info(yard_pb2.InfoRequest(), timeout=PATIENCE_S)
    assert info.version == "here"


def test_a_connection_that_says_nothing_is_closed(port):
    with ExitStack() as stack:
        connection = open_idle(stack, port)
        while connection.recv(1000):
            pass


CHILD = """
import resource, subprocess, sys
from servicekit.descriptors import raise_limit, restore_limit
raise_limit()
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
restore_limit(child.pid)
print(*(resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] for pid in (0, child.pid)))
child.communicate(b"\\n")
"""


def test_jobs_keep_the_limit_of_descriptors_that_the_yard_was_started_with():
    limited = ["sh", "-c", 'ulimit -Sn 200; exec "$@"', "sh", sys.executable, "-c", CHILD]
    own, childs = map(int, subprocess.run(limited, check=True, capture_output=True, text=True).stdout.split())
    assert (own > 200, childs) == (True, 200)
