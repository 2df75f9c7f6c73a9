"""The HTTP port of a service, for machines that watch it.

    /metrics   Prometheus metrics; needs the token for scraping, or the users'
    /healthz   200 while the process answers
    /readyz    200 while everything in it serves, else 503 with what does not

Three answers to GET, each on a connection of its own, with bounds on what is read and for how long. The port is apart
from the one for calls, and connections without a request cannot fill it: the oldest of them makes room for a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from trainyard.endpoints import join_host_port

from servicekit.certificates import http_context
from servicekit.health import Health
from servicekit.refusals import Refusals
from servicekit.server import Tls, require_tls_beyond_loopback

_REQUEST_TIMEOUT_S = 10.0
_HANDSHAKE_TIMEOUT_S = 5.0
_MAX_REQUEST_BYTES = 16 * 1024
_MAX_CONNECTIONS = 64
_PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class _Answer:
    status: str
    body: bytes = b""
    content_type: str = _PLAIN
    headers: tuple[str, ...] = ()


class Exposition:
    """Serves metrics and health over HTTP.

    Args:
        registry: what is shown.
        health: who serves.
        tokens: the bearer tokens that open `/metrics`: the users', and one that opens nothing else.
        refusals: counts and logs other tokens.
    """

    def __init__(self, registry: CollectorRegistry, health: Health, tokens: Sequence[str], refusals: Refusals) -> None:
        self._registry = registry
        self._health = health
        self._tokens = [token.encode() for token in tokens]
        self._refusals = refusals
        self._server: asyncio.Server | None = None
        self._connections = 0
        self._silent: dict[asyncio.StreamWriter, None] = {}  # connections without a request yet, the oldest first

    async def start(self, host: str, port: int, tls: Tls | None = None) -> int:
        """Listens; returns the port (a free one for 0).

        Raises:
            ValueError: the address is beyond loopback and there is no certificate.
            RuntimeError: the port is taken.
        """
        require_tls_beyond_loopback(host, port, tls)
        context = http_context(tls) if tls is not None else None
        try:
            self._server = await asyncio.start_server(
                self._serve,
                host,
                port,
                ssl=context,
                limit=_MAX_REQUEST_BYTES,
                ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S if context else None,
            )
        except OSError as error:
            raise RuntimeError(f"cannot serve metrics on {join_host_port(host, port)}: {error.strerror}") from error
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Answers no more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        self._silent[writer] = None
        # Without a bound they would take the file descriptors of the whole service.
        if self._connections > _MAX_CONNECTIONS:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                request = await reader.readuntil(b"\r\n\r\n")
                self._silent.pop(writer, None)
                writer.write(_encoded(await self._answer(request, _peer(writer))))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # not HTTP, too slow, or gone
        finally:
            self._silent.pop(writer, None)
            self._connections -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, request: bytes, peer: str) -> _Answer:
        first, *lines = request.decode("latin-1").split("\r\n")
        method, _, rest = first.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method != "GET":
            return _Answer("405 Method Not Allowed", headers=("Allow: GET",))
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if path == "/healthz":
            return _Answer("200 OK", b"ok\n")
        if path == "/readyz":
            return self._readiness()
        if path == "/metrics":
            return await self._metrics(headers, peer)
        return _Answer("404 Not Found", b"there are /metrics, /healthz and /readyz\n")

    def _opens(self, token: str) -> bool:
        return any(hmac.compare_digest(token.encode(), known) for known in self._tokens)

    def _readiness(self) -> _Answer:
        missing = self._health.missing()
        if missing:
            return _Answer("503 Service Unavailable", f"not ready: {', '.join(missing)}\n".encode())
        return _Answer("200 OK", b"ready\n")

    async def _metrics(self, headers: dict[str, str], peer: str) -> _Answer:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not self._opens(token):
            self._refusals.add(peer, "/metrics", "BadToken" if token else "NoToken")
            return _Answer(
                "401 Unauthorized",
                b"send 'Authorization: Bearer <token>': the token for scraping, or the yard's token\n",
                headers=("WWW-Authenticate: Bearer",),
            )
        try:
            encode, content_type = choose_encoder(headers.get("accept", ""))
        except (ValueError, TypeError):  # what a version that is no number makes of it
            return _Answer("400 Bad Request", b"the Accept header is malformed: send 'text/plain', or none\n")
        return _Answer("200 OK", await asyncio.to_thread(encode, self._registry), content_type)


def _peer(writer: asyncio.StreamWriter) -> str:
    """The caller's address as gRPC writes it."""
    host, port, *ipv6 = writer.get_extra_info("peername") or ("unknown", 0)
    return f"{'ipv6' if ipv6 else 'ipv4'}:{join_host_port(host, port)}"


def _encoded(answer: _Answer) -> bytes:
    head = [
        f"HTTP/1.1 {answer.status}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Connection: close",
        *answer.headers,
    ]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + answer.body
