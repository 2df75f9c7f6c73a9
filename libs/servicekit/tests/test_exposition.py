"""What a machine that watches a service can ask over HTTP."""

import asyncio
import ssl
import subprocess
import urllib.error
import urllib.request

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter
from servicekit import exposition
from servicekit.auth import AttemptTokens
from servicekit.exposition import Exposition
from servicekit.health import Health
from servicekit.host import Host
from servicekit.refusals import Refusals
from servicekit.server import Tls
from trainyard_protos.v1 import scheduler_pb2, scheduler_pb2_grpc

from scripts.testbed.patience import PATIENCE_S

TOKEN, SCRAPING = "the-token-of-this-yard", "a-token-for-prometheus"


@pytest.fixture
async def exposed():
    registry = CollectorRegistry()
    Counter("points", "Points", registry=registry).inc(3)
    health = Health(["metrics", "artifacts"], registry)
    server = Exposition(registry, health, [TOKEN, SCRAPING], Refusals(registry))
    port = await server.start("127.0.0.1", 0)
    yield health, f"http://127.0.0.1:{port}"
    await server.stop()


async def get(url, token="", context=None):
    """Status and body."""

    def ask():
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            request = urllib.request.Request(url, headers=headers)
            with urllib.request.urlopen(request, timeout=PATIENCE_S, context=context) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize("token", [TOKEN, SCRAPING])
async def test_metrics_are_shown_to_who_has_the_token_of_users_or_the_one_for_scraping(exposed, token):
    _, url = exposed
    status, body = await get(f"{url}/metrics", token)
    assert (status, "points_total 3.0" in body) == (200, True)


class Pools(scheduler_pb2_grpc.SchedulerServiceServicer):
    async def ListPools(self, request, context):
        return scheduler_pb2.ListPoolsResponse()


@pytest.mark.parametrize("scraping", ["", SCRAPING])
async def test_the_token_for_scraping_opens_no_call_and_none_opens_nothing(tmp_path, scraping):
    host = Host(["metrics"], tmp_path, TOKEN, AttemptTokens.load_or_create(tmp_path), metrics_token=scraping)
    url = await host.expose("127.0.0.1", 0)
    port = host.listen("127.0.0.1", 0)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(Pools(), host.server)
    await host.server.start()
    try:
        assert (await get(url, SCRAPING))[0] == (200 if scraping else 401)
        assert (await get(url))[0] == 401
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call, request = scheduler_pb2_grpc.SchedulerServiceStub(channel).ListPools, scheduler_pb2.ListPoolsRequest()
            await call(request, metadata=(("authorization", f"Bearer {TOKEN}"),))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(request, metadata=(("authorization", f"Bearer {SCRAPING}"),))
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    finally:
        await host.stop()


@pytest.mark.parametrize("token", ["", "another", TOKEN[:-1]])
async def test_metrics_are_not_shown_to_others(exposed, token):
    _, url = exposed
    status, body = await get(f"{url}/metrics", token)
    assert (status, "points" in body) == (401, False)


async def test_a_process_is_healthy_before_its_services_are_ready(exposed):
    health, url = exposed
    assert (await get(f"{url}/healthz"))[0] == 200
    assert await get(f"{url}/readyz") == (503, "not ready: metrics, artifacts\n")
    await health.set("metrics", True)
    assert await get(f"{url}/readyz") == (503, "not ready: artifacts\n")
    await health.set("artifacts", True)
    assert await get(f"{url}/readyz") == (200, "ready\n")
    assert 'trainyard_ready{service="metrics"} 1.0' in (await get(f"{url}/metrics", TOKEN))[1]
    registered = health.condition("metrics", "registered")
    assert await get(f"{url}/readyz") == (503, "not ready: metrics\n")
    await registered(True)
    assert (await get(f"{url}/readyz"))[0] == 200
    await registered(False)
    assert await get(f"{url}/readyz") == (503, "not ready: metrics\n")
    await registered(True)
    await health.leave()
    assert (await get(f"{url}/readyz"))[0] == 503


async def test_other_paths_are_told_what_there_is(exposed):
    _, url = exposed
    assert await get(f"{url}/") == (404, "there are /metrics, /healthz and /readyz\n")


async def test_a_request_that_is_no_http_is_dropped(exposed):
    _, url = exposed
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(b"x" * 100_000)
    assert await asyncio.wait_for(_rest(reader), 10) == b""
    writer.close()


async def _rest(reader):
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_connections_that_send_nothing_keep_no_probe_out(monkeypatch, exposed):
    _, url = exposed
    monkeypatch.setattr(exposition, "_REQUEST_TIMEOUT_S", 100 * PATIENCE_S)  # none ends because it is old
    port = int(url.rpartition(":")[2])
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(150)]
    assert await get(f"{url}/healthz") == (200, "ok\n")
    oldest, newest = silent[0], silent[-1]
    assert await asyncio.wait_for(_rest(oldest[0]), PATIENCE_S) == b""  # it made room
    newest[1].write(b"GET /healthz HTTP/1.1\r\n\r\n")
    assert (await newest[0].read()).startswith(b"HTTP/1.1 200")
    for _, writer in silent:
        writer.close()
    assert (await get(f"{url}/healthz"))[0] == 200


async def test_a_refused_token_is_counted(exposed):
    _, url = exposed
    await get(f"{url}/metrics", "another")
    _, body = await get(f"{url}/metrics", TOKEN)
    assert 'trainyard_refused_tokens_total{method="/metrics",reason="BadToken"} 1.0' in body


@pytest.mark.parametrize(
    "accept", ["text/plain;version=x;escaping=allow-utf-8", "application/openmetrics-text;version=a"]
)
async def test_an_accept_header_that_means_nothing_is_refused(exposed, accept):
    _, url = exposed
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(f"GET /metrics HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nAccept: {accept}\r\n\r\n".encode())
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()


async def test_beyond_loopback_it_wants_a_certificate():
    server = Exposition(
        CollectorRegistry(), Health([], CollectorRegistry()), [TOKEN, SCRAPING], Refusals(CollectorRegistry())
    )
    with pytest.raises(ValueError, match="without TLS"):
        await server.start("0.0.0.0", 0)


async def test_with_a_certificate_it_speaks_tls(tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    server = Exposition(
        CollectorRegistry(), Health([], CollectorRegistry()), [TOKEN, SCRAPING], Refusals(CollectorRegistry())
    )
    port = await server.start("127.0.0.1", 0, Tls(certificate, key))
    context = ssl.create_default_context(cafile=str(certificate))
    assert (await get(f"https://127.0.0.1:{port}/healthz", context=context))[0] == 200
    await server.stop()
