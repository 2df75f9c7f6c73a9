"""The gRPC server every service runs behind: authentication, errors, limits, health, TLS."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram
from trainyard.channel import OPTIONS, is_loopback
from trainyard.endpoints import join_host_port

from servicekit import descriptors
from servicekit.auth import Authenticator, Principal, current_principal, set_principal
from servicekit.certificates import Tls as Tls
from servicekit.certificates import grpc_credentials
from servicekit.errors import Internal, PermissionDenied, ServiceError, Unauthenticated, Unavailable
from servicekit.limits import CallLimiter, OpenStream, StreamLimiter
from servicekit.receptions import Receptions
from servicekit.refusals import Refusals
from servicekit.requests import Memory, ParsedRequests, RequestReader, Share, is_large

logger = logging.getLogger(__name__)

# Who calls these has no token of the yard yet: they find out themselves who it is, and bound what that costs. Counting
# strangers together here would let one of them keep all others out.
_INTRODUCTIONS = frozenset(
    {"/trainyard.v1.AgentService/Join", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
)
_HANDSHAKE_TIMEOUT_MS = 10_000
_CONNECTION_IDLE_MS = 600_000  # without a call; clients connect again when they next have one
_MAX_STREAMS = 4096  # of one connection; further calls of its client wait
_STALLED_S = 600.0
"""A client that does not take the next message of a stream for this long has left it."""
_LARGE_OF_ATTEMPT = 8  # large requests of one attempt that are received or handled at a time; its others wait
# An agent that was cut off for longer than its token lives gets its next one here.
_RENEWALS = frozenset({"/trainyard.v1.AgentService/Session"})
# All that a delivery token is good for.
_DELIVERIES = frozenset(f"/trainyard.v1.MetricsService/{name}" for name in ("OpenRun", "Append", "GetPosition"))


class Calls:
    """Counts and times every call."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.handled = Counter(
            "trainyard_grpc_calls", "Calls by method and status", ["method", "code"], registry=registry
        )
        self.seconds = Histogram("trainyard_grpc_call_seconds", "Time of unary calls", ["method"], registry=registry)


class _Guard(grpc.aio.ServerInterceptor):
    """Wraps each method: who is calling first, then the request, then the method, then its errors as statuses.

    The caller is known from the metadata: a call that is refused ends before any of its messages is received. What is
    received is measured on the encoded bytes before it is parsed.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        calls: Calls,
        limiter: CallLimiter,
        streams: StreamLimiter,
        refusals: Refusals,
        stalled_s: float,
    ) -> None:
        self._authenticator = authenticator
        self._calls = calls
        self._limiter = limiter
        self._streams = streams
        self._stalled_s = stalled_s
        self._cutting: set[asyncio.Task[None]] = set()
        self._refusals = refusals
        self._memory = Memory()
        self._turns = _Turns(_LARGE_OF_ATTEMPT)
        self._receptions: dict[str, Receptions] = {}  # by service: silent agents keep no health check waiting
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        method = str(details.method)
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(details)
            if handler is None:
                return None
            wrapped = self._wrapped[method] = self._wrap(method, handler)
        if method not in _INTRODUCTIONS:
            try:
                principal = self._admit(method, details)
            except ServiceError as error:
                return self._refuse(method, error)
            if principal.kind != "user" and not wrapped.request_streaming and is_large(method):
                await self._turns.take(principal.attempt_id)  # the message is received after this
        return wrapped

    def _admit(self, method: str, details: grpc.HandlerCallDetails) -> Principal:
        header = ""
        for key, value in details.invocation_metadata or ():
            if key == "authorization":
                header = value if isinstance(value, str) else value.decode(errors="replace")
        principal = self._authenticator.authenticate(header, renewing=method in _RENEWALS)
        if principal.kind == "delivery" and method not in _DELIVERIES:
            raise PermissionDenied(
                f"a delivery token may not call {method}",
                reason="DeliveryOnly",
                hint="it delivers the records of an attempt that is over",
            )
        self._limiter.admit(principal, _service_of(method))
        set_principal(principal)  # the handler runs in the same task
        return principal

    def _refuse(self, method: str, error: ServiceError) -> grpc.RpcMethodHandler[Any, Any]:
        # Of streams gRPC receives what the method asks for: this one asks for nothing, whatever kind the client calls.
        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            failed = self._fail(method, error, context)
            del context  # see `_fail`
            await failed

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _wrap(self, method: str, handler: Any) -> Any:
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        takes_stream = handler.request_streaming
        if method in _INTRODUCTIONS:
            # Taken as a stream: its message is received when it is asked for, not as soon as the call comes.
            receptions = self._receptions.setdefault(_service_of(method), Receptions())
            behaviour, takes_stream = _introduced(behaviour, receptions), True
        requests = _Requests(
            RequestReader(method, handler.request_deserializer), takes_stream, method in _INTRODUCTIONS | _RENEWALS
        )
        if handler.response_streaming:
            make = grpc.stream_stream_rpc_method_handler if takes_stream else grpc.unary_stream_rpc_method_handler
            wrapped: Callable[..., Any] = self._streaming(
                method, behaviour, requests, exchange=handler.request_streaming
            )
        else:
            make = grpc.stream_unary_rpc_method_handler if takes_stream else grpc.unary_unary_rpc_method_handler
            wrapped = self._unary(method, behaviour, requests)
        return make(wrapped, None, handler.response_serializer)

    def _unary(self, method: str, behaviour: Callable[..., Any], requests: _Requests) -> Callable[..., Any]:
        seconds = self._calls.seconds.labels(method)
        done = self._calls.handled.labels(method, "OK")

        @functools.wraps(behaviour)
        async def call(raw: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            started = time.perf_counter()
            share = self._memory.share()
            try:
                request, _ = await requests.of(raw, share)
                raw = None
                response = await behaviour(request, context)
            except Exception as error:
                failed = self._fail(method, error, context)
                raw = request = None  # see `_fail`
                del context
                await failed
                raise AssertionError("abort raises") from error
            finally:
                share.give_back()
            seconds.observe(time.perf_counter() - started)
            done.inc()
            return response

        return call

    def _streaming(
        self, method: str, behaviour: Callable[..., Any], requests: _Requests, *, exchange: bool
    ) -> Callable[..., Any]:
        done = self._calls.handled.labels(method, "OK")

        @functools.wraps(behaviour)
        async def call(raw: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            share = self._memory.share()
            try:
                request, check = await requests.of(raw, share)
                raw = None
                if not requests.takes_stream:
                    share.give_back()  # answers may take as long as their reader likes
                responses = behaviour(request, context)
                if inspect.isawaitable(responses):  # a servicer that writes through the context
                    await responses
                else:
                    stream = self._admit_stream(method, exchange=exchange)
                    try:
                        async for response in responses:
                            check()
                            with nullcontext() if exchange else self._cut_when_stalled(method, context, stream):
                                yield response
                    finally:
                        stream.close()
            except Exception as error:
                failed = self._fail(method, error, context)
                raw = request = responses = None  # see `_fail`
                del context
                await failed
            finally:
                share.give_back()
            done.inc()

        return call

    def _admit_stream(self, method: str, *, exchange: bool) -> OpenStream:
        if method in _INTRODUCTIONS:
            return OpenStream()
        return self._streams.open(current_principal(), method, exchange=exchange)

    @contextmanager
    def _cut_when_stalled(
        self, method: str, context: grpc.aio.ServicerContext[Any, Any], stream: OpenStream
    ) -> Iterator[None]:
        """Ends the call when its client does not take a message for `stalled_s` seconds."""
        task = asyncio.current_task()
        assert task is not None, "a call runs in a task"

        def cut() -> None:
            ending = asyncio.create_task(self._cut(method, context, stream.take_over()))
            self._cutting.add(ending)
            ending.add_done_callback(self._cutting.discard)
            task.cancel()

        timer = asyncio.get_running_loop().call_later(self._stalled_s, cut)
        try:
            yield
        finally:
            timer.cancel()

    async def _cut(self, method: str, context: grpc.aio.ServicerContext[Any, Any], stream: OpenStream) -> None:
        """Sends the status behind the message that the client has not taken: it arrives when the client reads again.
        Until then, or until the client leaves, the stream counts, because gRPC keeps the message."""
        error = Unavailable(
            f"the client took no message of this stream for {self._stalled_s:g} s",
            reason="ReaderStalled",
            hint="call again, from the position of the last message",
        )
        try:
            with suppress(grpc.aio.AbortError, asyncio.CancelledError):
                await self._fail(method, error, context)
        finally:
            stream.close()

    async def _fail(self, method: str, error: Exception, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Ends a call with the status of an error.

        The state of a call keeps the error that this raises, with its frames. Neither they nor the frames of `error`
        may keep the state of the call: it has the last message that was received, of up to 16 MiB, and as a cycle it
        would stay until the garbage is collected.
        """
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if not isinstance(error, ServiceError):
            logger.error("unexpected error in a method", extra={"method": method}, exc_info=error)
            error = Internal(
                f"{type(error).__name__} in {method}",
                reason="Internal",
                hint="this is a defect: the yard's log has the details",
            )
        self._calls.handled.labels(method, error.code.name).inc()
        error.__traceback__ = error.__context__ = error.__cause__ = None
        if isinstance(error, (Unauthenticated, PermissionDenied)):
            self._refusals.add(context.peer(), method, error.reason)
        aborted = context.abort(error.code, error.message, trailing_metadata=error.trailing_metadata())
        del context
        await aborted


def _never_expires() -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Requests:
    """What a method is given: its request, or its stream of requests, which ends when the caller's token does."""

    reader: RequestReader
    takes_stream: bool
    never_expires: bool

    async def of(self, raw: Any, share: Share) -> tuple[Any, Callable[[], None]]:
        """The request; and what refuses the next message once the token has expired."""
        check = _never_expires if self.never_expires else current_principal().check
        if self.takes_stream:
            return ParsedRequests(raw, self.reader, check, share), check
        return await self.reader.read(raw, share), check


class _Turns:
    """Lets only so many tasks of each attempt run at a time; a task keeps its turn until it ends.

    Args:
        at_once: number of tasks of one attempt.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._of_attempt: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def take(self, attempt_id: str) -> None:
        """Waits for a turn of the task that runs now, which is that of one call."""
        turns = self._of_attempt.get(attempt_id)
        if turns is None:
            turns = self._of_attempt[attempt_id] = asyncio.Semaphore(self._at_once)
        await turns.acquire()
        task = asyncio.current_task()
        assert task is not None
        # Not when the handler returns: it never runs when the call breaks off before its message is whole.
        task.add_done_callback(lambda _: turns.release())


def _introduced(behaviour: Callable[..., Any], receptions: Receptions) -> Callable[..., Any]:
    """A method with one request, for anybody."""

    @functools.wraps(behaviour)
    async def call(requests: ParsedRequests, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return await behaviour(await receptions.receive(requests), context)

    return call


def _service_of(method: str) -> str:
    return method.split("/")[1].rpartition(".")[2]


def build(
    authenticator: Authenticator,
    registry: CollectorRegistry,
    before: Sequence[grpc.aio.ServerInterceptor] = (),
    limiter: CallLimiter | None = None,
    refusals: Refusals | None = None,
    streams: StreamLimiter | None = None,
    stalled_s: float = _STALLED_S,
) -> grpc.aio.Server:
    """A server without a port. Register services, `listen`, then start it.

    Args:
        before: runs ahead of authentication.
        stalled_s: seconds after which a stream ends whose client does not take its next message.
    """
    options = (
        *OPTIONS,
        ("grpc.compression_enabled_algorithms_bitset", 1),  # none but identity: see decision 0026
        # Connections that nobody uses end, and there are never more than the process has descriptors for.
        ("grpc.max_allowed_incoming_connections", descriptors.for_connections()),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_connection_idle_ms", _CONNECTION_IDLE_MS),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.so_reuseport", 0),  # a taken port is an error, not a second server on it
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
    )
    guard = _Guard(
        authenticator,
        Calls(registry),
        limiter or CallLimiter(),
        streams or StreamLimiter(),
        refusals or Refusals(registry),
        stalled_s,
    )
    logging.getLogger("grpc._cython.cygrpc").addFilter(_of_a_living_call)
    return grpc.aio.server(interceptors=[*before, guard], options=options)


def _of_a_living_call(record: logging.LogRecord) -> bool:
    """Drops the lines, with a traceback each, that gRPC writes when a call ended before its answer was sent.

    Whoever reaches the port can cause them in any number, without a token: by a compressed message, or by leaving.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


def require_tls_beyond_loopback(host: str, port: int, tls: Tls | None) -> None:
    """A token is a password.

    Raises:
        ValueError: the address is beyond loopback and there is no certificate.
    """
    address = join_host_port(host, port)
    if tls is None and not is_loopback(address):
        raise ValueError(
            f"refusing to listen on {address} without TLS: tokens would travel in plaintext. "
            "Give --tls-cert and --tls-key, or listen on 127.0.0.1"
        )


def listen(server: grpc.aio.Server, host: str, port: int, tls: Tls | None = None) -> int:
    """Binds the server; returns the port (a free one for 0).

    Raises:
        ValueError: the address is beyond loopback and there is no certificate.
        RuntimeError: the port is taken.
    """
    address = join_host_port(host, port)
    require_tls_beyond_loopback(host, port, tls)
    try:
        return int(_bind(server, address, tls))
    except RuntimeError as error:
        raise RuntimeError(f"cannot listen on {address}: is the port taken?") from error


def _bind(server: grpc.aio.Server, address: str, tls: Tls | None) -> int:
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, grpc_credentials(tls))
