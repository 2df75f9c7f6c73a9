"""Client side of a connection between services."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path

import grpc

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_METADATA_BYTES = 1024 * 1024

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

RECONNECT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
    ("grpc.enable_http_proxy", 0),
)


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of `host:port`.

    Raises:
        ValueError: it is not of that form.
    """
    host, separator, port = endpoint.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError(f"'{endpoint}' is not of the form host:port")
    return host.strip("[]"), int(port)


def _with_token(details: grpc.aio.ClientCallDetails, token: str) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    metadata.add("authorization", f"Bearer {token}")
    return grpc.aio.ClientCallDetails(
        method=details.method,
        timeout=details.timeout,
        metadata=metadata,
        credentials=details.credentials,
        wait_for_ready=details.wait_for_ready,
    )


TokenSource = Callable[[], str]


class _UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, token: TokenSource) -> None:
        self._token = token

    async def intercept_unary_unary(self, continuation, client_call_details, request):  # type: ignore[no-untyped-def, override]
        return await continuation(_with_token(client_call_details, self._token()), request)


class _UnaryStream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, token: TokenSource) -> None:
        self._token = token

    async def intercept_unary_stream(self, continuation, client_call_details, request):  # type: ignore[no-untyped-def, override]
        return await continuation(_with_token(client_call_details, self._token()), request)


class _StreamUnary(grpc.aio.StreamUnaryClientInterceptor):
    def __init__(self, token: TokenSource) -> None:
        self._token = token

    async def intercept_stream_unary(self, continuation, client_call_details, request_iterator):  # type: ignore[no-untyped-def, override]
        return await continuation(_with_token(client_call_details, self._token()), request_iterator)


class _StreamStream(grpc.aio.StreamStreamClientInterceptor):
    def __init__(self, token: TokenSource) -> None:
        self._token = token

    async def intercept_stream_stream(self, continuation, client_call_details, request_iterator):  # type: ignore[no-untyped-def, override]
        return await continuation(_with_token(client_call_details, self._token()), request_iterator)


def connect(endpoint: str, token: str | TokenSource, ca_file: Path | None = None) -> grpc.aio.Channel:
    """A channel to `host:port` that carries a bearer token on every call.

    Args:
        endpoint: `host:port`.
        token: the token, or a function that returns the one to use now (attempt tokens are renewed).
        ca_file: root certificate (PEM). Needed beyond loopback: a token never travels in plaintext.

    Raises:
        ValueError: the address is beyond loopback and there is no `ca_file`.
    """
    source = token if callable(token) else (lambda: token)
    interceptors = [_UnaryUnary(source), _UnaryStream(source), _StreamUnary(source), _StreamStream(source)]
    options = (*OPTIONS, *RECONNECT_OPTIONS)
    if ca_file is not None:
        credentials = grpc.ssl_channel_credentials(ca_file.read_bytes())
        return grpc.aio.secure_channel(endpoint, credentials, options=options, interceptors=interceptors)
    host, _ = split_endpoint(endpoint)
    if not is_loopback(host):
        raise ValueError(f"'{endpoint}' is beyond this machine: give the root certificate (ca_file), so that TLS is used")
    return grpc.aio.insecure_channel(endpoint, options=options, interceptors=interceptors)
