"""Runs the chart's gateway on loopback: nginx as the chart configures it, in front of real services."""

from __future__ import annotations

import asyncio
import datetime
import functools
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry
from servicekit import server as servers
from servicekit.auth import AttemptTokens, Authenticator, bearer_token
from servicekit.celery import celery_app
from servicekit.certificates import Tls
from trainyard.channel import connect
from trainyard_artifacts.app import Artifacts
from trainyard_artifacts.settings import Settings as ArtifactSettings
from trainyard_scheduler.app import Scheduler
from trainyard_scheduler.settings import Settings as SchedulerSettings
from trainyard_setup import certificates

from scripts.testbed import fetch
from scripts.testbed.ports import free_port
from scripts.testbed.proxy import NGINX, ROUTES, STREAM_MODULE
from scripts.testbed.server import Server
from tests.cluster.release import rendered

_BLOCK = 64 * 1024
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, RST_STREAM = 4, 1, 3
REFUSED_STREAM = 7
MAX_CONCURRENT_STREAMS = 3
_END_HEADERS = 4


@functools.cache
def configuration(limits: str = "{}") -> str:
    """The gateway's nginx.conf.

    Args:
        limits: `gateway.limits` of the values, JSON.
    """
    objects = rendered({"gateway": {"limits": json.loads(limits)}})
    found = {f"{each['kind']}/{each['metadata']['name']}": each for each in objects}
    return str(found["ConfigMap/yard-trainyard-gateway"]["data"]["nginx.conf"])


class Gateway(Server):
    """nginx as the chart runs it, but with addresses, files and ports of this machine, and in one process.

    The kernel ends one process together with the one that started it; it would not end nginx's workers.

    Args:
        services: the port of 127.0.0.1 of each service of the yard.
        limits: `gateway.limits` of the chart's values.
    """

    name = "gateway"

    def __init__(self, folder: Path, services: Mapping[str, int], limits: Mapping[str, object]) -> None:
        super().__init__(folder)
        self.probe_port = free_port()
        self._services = services
        self._limits = json.dumps(dict(limits))
        self._program = fetch.debian(*NGINX)
        self._module = fetch.debian(*STREAM_MODULE)

    def prepare(self) -> None:
        here = {
            "/etc/trainyard/tls/": f"{self.folder}/",
            STREAM_MODULE[1]: str(self._module.path),
            "unix:/tmp/http.sock": "unix:http.sock",
            "listen 8443 ": f"listen 127.0.0.1:{self.port} ",
            "listen 8444 ": f"listen 127.0.0.1:{self.probe_port} ",
            "worker_processes 2;": "master_process off;",
        }
        here |= {f"{host_of(name)}:7443": f"127.0.0.1:{port}" for name, port in self._services.items()}
        text = configuration(self._limits)
        for old, new in here.items():
            assert old in text, old
            text = text.replace(old, new)
        (self.folder / "nginx.conf").write_text(text)

    def command(self) -> list[str]:
        nginx = [str(self._program.path), "-p", str(self.folder), "-e", "stderr", "-c", "nginx.conf"]
        return ["sh", "-ec", 'ulimit -S -n "$(ulimit -H -n)"; exec "$@"', "sh", *nginx]  # as in the chart

    def environ(self) -> Mapping[str, str]:
        return self._program.environ()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def channel(self, token: str, endpoint: str = "") -> grpc.aio.Channel:
        """A client's connection."""
        return connect(endpoint or self.endpoint, token, self.folder / "ca.crt")

    async def dial(self, source: str) -> Wire:
        """An HTTP/2 connection from an address of this machine."""
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        context.set_alpn_protocols(["h2"])
        streams = await asyncio.open_connection("127.0.0.1", self.port, ssl=context, local_addr=(source, 0))
        return Wire(*streams)

    async def probe(self) -> str:
        """What the kubelet's probe is answered: the first line."""
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        reader, writer = await asyncio.open_connection("127.0.0.1", self.probe_port, ssl=context)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: probe\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer.split(b"\r\n")[0].decode()


def host_of(service: str) -> str:
    """The name of a service in the cluster."""
    return f"yard-trainyard-{service}.platform.svc"


class Wire:
    """HTTP/2, frame by frame, for what no library would send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._writer.write(_PREFACE + frame(SETTINGS, 0, b""))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def call(self, number: int, method: str, token: str) -> None:
        """The headers of a call, which then sends nothing."""
        fields = {":method": "POST", ":scheme": "https", ":path": method, ":authority": "yard"}
        fields |= {"content-type": "application/grpc", "te": "trailers", "authorization": f"Bearer {token}"}
        block = b"".join(_literal(name, value) for name, value in fields.items())
        self.send(frame(HEADERS, number, block, _END_HEADERS))

    async def receive(self, kind: int) -> tuple[int, bytes]:
        """Stream and content of the next frame of a kind.

        Raises:
            asyncio.IncompleteReadError: the connection was closed.
        """
        while True:
            head = await self._reader.readexactly(9)
            content = await self._reader.readexactly(int.from_bytes(head[:3]))
            if head[3] == kind and not (kind == SETTINGS and head[4]):  # not an acknowledgement
                return int.from_bytes(head[5:]), content

    async def closed(self) -> None:
        """Returns when the other side has closed the connection."""
        with suppress(ConnectionError, ssl.SSLError):
            while await self._reader.read(_BLOCK):
                pass

    async def close(self) -> None:
        self._writer.transport.abort()


def frame(kind: int, stream: int, content: bytes, flags: int = 0) -> bytes:
    """One frame."""
    return len(content).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + content


def _literal(name: str, value: str) -> bytes:
    """A header field that is neither indexed nor compressed; names and values below 254 bytes."""
    return b"\x00" + b"".join(_length(len(each)) + each.encode() for each in (name, value))


def _length(number: int) -> bytes:
    return bytes([number]) if number < 127 else bytes([127, number - 127])


def settings(content: bytes) -> dict[int, int]:
    """The settings in a SETTINGS frame."""
    pairs = [content[at : at + 6] for at in range(0, len(content), 6)]
    return {int.from_bytes(each[:2]): int.from_bytes(each[2:]) for each in pairs}


@asynccontextmanager
async def from_address(source: str, port: int) -> AsyncIterator[str]:
    """An endpoint whose clients reach a port of 127.0.0.1 from another address of this machine."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_pass_on(reader, inner[1]), _pass_on(inner[0], writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while block := await reader.read(_BLOCK):
            writer.write(block)
            await writer.drain()
    writer.close()


class Services:
    """Scheduler and artifact store behind one TLS server; the launcher and metrics are down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = bearer_token(folder)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[dict[str, int]]:
        """The port of each service of the yard."""
        authenticator = Authenticator(self.token, AttemptTokens.load_or_create(self.folder))
        server = servers.build(authenticator, CollectorRegistry())
        database = f"sqlite:///{self.folder}"
        scheduler = Scheduler(
            home=self.folder,
            database_url=f"{database}/scheduler.db",
            celery=celery_app(f"inprocess://{self.folder.name}"),
            settings=SchedulerSettings(),
        )
        artifacts = Artifacts(home=self.folder, database_url=f"{database}/artifacts.db", settings=ArtifactSettings())
        scheduler.register(server)
        artifacts.register(server)
        port = servers.listen(server, "127.0.0.1", 0, self._certificate())
        await scheduler.start()
        await artifacts.start()
        await server.start()
        try:
            yield {name: port if name in ("scheduler", "artifacts") else free_port() for name in ROUTES}
        finally:
            await server.stop(None)
            await artifacts.stop()
            await scheduler.stop()

    def _certificate(self) -> Tls:
        now = datetime.datetime.now(datetime.UTC)
        authority = certificates.make_authority("yard", now)
        hosts = ["127.0.0.1", "localhost", *map(host_of, ROUTES)]
        pair = certificates.issue(authority, "yard", hosts, now, 30)
        for name, content in (("ca.crt", authority.certificate), ("tls.crt", pair.certificate), ("tls.key", pair.key)):
            (self.folder / name).write_bytes(content)
        return Tls(self.folder / "tls.crt", self.folder / "tls.key")


def tcp(port: int, source: str) -> socket.socket:
    """A connection on which nothing is sent."""
    return socket.create_connection(("127.0.0.1", port), source_address=(source, 0))


def limit_of(text: str, method: str) -> tuple[int, str]:
    """Of a method, by nginx's longest match: the most bytes of a request (0 for any), and how long it may be silent."""
    place = re.search(rf"location = {re.escape(method)} {{(.*?)}}", text, re.DOTALL)
    inside = place[1] if place else ""

    def setting(name: str) -> str:
        found = re.search(rf"{name} (\S+);", inside) or re.search(rf"\n    {name} (\S+);", text)
        assert found
        return found[1]

    return int(setting("client_max_body_size")), setting("client_body_timeout")
