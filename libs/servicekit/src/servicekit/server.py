"""The gRPC server every service runs behind: authentication, errors, limits, health, TLS."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram
from trainyard.channel import OPTIONS, is_loopback

from servicekit.auth import Authenticator, set_principal
from servicekit.certificates import Tls as Tls
from servicekit.certificates import grpc_credentials
from servicekit.errors import Internal, PermissionDenied, ServiceError
from servicekit.limits import CallLimiter

logger = logging.getLogger(__name__)

_OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
# Who calls these has no token of the yard yet: they find out themselves who it is, and bound what that costs. Counting
# strangers together here would let one of them keep all others out.
_INTRODUCTIONS = frozenset({"/trainyard.v1.AgentService/Join"})
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
    """Wraps each method: who is calling first, then the method, then its errors as statuses."""

    def __init__(self, authenticator: Authenticator, calls: Calls, limiter: CallLimiter) -> None:
        self._authenticator = authenticator
        self._calls = calls
        self._limiter = limiter
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        method = str(details.method)
        known = self._wrapped.get(method)
        if known is not None:
            return known
        handler = await continuation(details)
        if handler is None or method in _OPEN_METHODS:
            return handler
        wrapped = self._wrap(method, handler)
        self._wrapped[method] = wrapped
        return wrapped

    def _wrap(self, method: str, handler: Any) -> Any:
        if handler.response_streaming:
            behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            wrapped: Callable[..., Any] = self._streaming(method, behaviour, takes_stream=handler.request_streaming)
        else:
            behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            wrapped = self._unary(method, behaviour, takes_stream=handler.request_streaming)
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    def _admit(self, method: str, service: str, context: grpc.aio.ServicerContext[Any, Any]) -> Callable[[], None]:
        """Lets a call in, or refuses it; returns what refuses its next message once its token has expired."""
        if method in _INTRODUCTIONS:
            return _never_expires
        header = ""
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                header = value if isinstance(value, str) else value.decode(errors="replace")
        renewing = method in _RENEWALS
        principal = self._authenticator.authenticate(header, renewing=renewing)
        if principal.kind == "delivery" and method not in _DELIVERIES:
            raise PermissionDenied(
                f"a delivery token may not call {method}",
                reason="DeliveryOnly",
                hint="it delivers the records of an attempt that is over",
            )
        self._limiter.admit(principal, service)
        set_principal(principal)
        return _never_expires if renewing else principal.check

    def _unary(self, method: str, behaviour: Callable[..., Any], *, takes_stream: bool) -> Callable[..., Any]:
        seconds = self._calls.seconds.labels(method)
        done = self._calls.handled.labels(method, "OK")
        service = _service_of(method)

        @functools.wraps(behaviour)
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            started = time.perf_counter()
            try:
                check = self._admit(method, service, context)
                response = await behaviour(_checked(request, check) if takes_stream else request, context)
            except Exception as error:
                await self._fail(method, error, context)
                raise AssertionError("abort raises") from error
            seconds.observe(time.perf_counter() - started)
            done.inc()
            return response

        return call

    def _streaming(self, method: str, behaviour: Callable[..., Any], *, takes_stream: bool) -> Callable[..., Any]:
        done = self._calls.handled.labels(method, "OK")
        service = _service_of(method)

        @functools.wraps(behaviour)
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                check = self._admit(method, service, context)
                responses = behaviour(_checked(request, check) if takes_stream else request, context)
                if inspect.isawaitable(responses):  # a servicer that writes through the context
                    await responses
                else:
                    async for response in responses:
                        check()
                        yield response
            except Exception as error:
                await self._fail(method, error, context)
            done.inc()

        return call

    async def _fail(self, method: str, error: Exception, context: grpc.aio.ServicerContext[Any, Any]) -> None:
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
        await context.abort(error.code, error.message, trailing_metadata=error.trailing_metadata())


def _never_expires() -> None:
    pass


async def _checked(messages: AsyncIterator[Any], check: Callable[[], None]) -> AsyncIterator[Any]:
    async for message in messages:
        check()
        yield message


def _service_of(method: str) -> str:
    return method.split("/")[1].rpartition(".")[2]


def build(
    authenticator: Authenticator,
    registry: CollectorRegistry,
    before: Sequence[grpc.aio.ServerInterceptor] = (),
    limiter: CallLimiter | None = None,
) -> grpc.aio.Server:
    """A server without a port. Register services, `listen`, then start it. `before` runs ahead of authentication."""
    options = (
        *OPTIONS,
        ("grpc.so_reuseport", 0),  # a taken port is an error, not a second server on it
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
    )
    guard = _Guard(authenticator, Calls(registry), limiter or CallLimiter())
    return grpc.aio.server(interceptors=[*before, guard], options=options)


def require_tls_beyond_loopback(host: str, port: int, tls: Tls | None) -> None:
    """A token is a password.

    Raises:
        ValueError: the address is beyond loopback and there is no certificate.
    """
    if tls is None and not is_loopback(f"{host}:{port}"):
        raise ValueError(
            f"refusing to listen on {host}:{port} without TLS: tokens would travel in plaintext. "
            "Give --tls-cert and --tls-key, or listen on 127.0.0.1"
        )


def listen(server: grpc.aio.Server, host: str, port: int, tls: Tls | None = None) -> int:
    """Binds the server; returns the port (a free one for 0).

    Raises:
        ValueError: the address is beyond loopback and there is no certificate.
        RuntimeError: the port is taken.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    require_tls_beyond_loopback(host, port, tls)
    try:
        return int(_bind(server, address, tls))
    except RuntimeError as error:
        raise RuntimeError(f"cannot listen on {address}: is the port taken?") from error


def _bind(server: grpc.aio.Server, address: str, tls: Tls | None) -> int:
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, grpc_credentials(tls))
