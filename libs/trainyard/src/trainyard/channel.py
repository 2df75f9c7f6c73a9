"""Connections from a user's machine, or from an agent, to a yard.

A token is a password: it travels beyond this machine under TLS only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from trainyard.endpoints import split_host_port

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_METADATA_BYTES = 1024 * 1024

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # how long one try may take; the pause between tries is shorter
    ("grpc.max_reconnect_backoff_ms", 5000),
    # A connection that died without a word (a firewall forgot it, a machine lost its power) is noticed within 30 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
)


def is_loopback(endpoint: str) -> bool:
    """Whether `host:port` can only be reached from this machine.

    Raises:
        InvalidEndpoint: it is not `host:port`.
    """
    host, _ = split_host_port(endpoint)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def connect(
    endpoint: str, token: str | Callable[[], str], ca: Path | bytes | None = None, server_name: str = ""
) -> grpc.aio.Channel:
    """A channel to `host:port` that carries a bearer token on every call.

    Args:
        endpoint: `host:port`.
        token: the token, or a function that returns the one to use now (attempt tokens are renewed).
        ca: root certificate (PEM), or its file. Needed beyond loopback.
        server_name: whose certificate is expected; "" for the endpoint's host.

    Raises:
        InvalidEndpoint: it is not `host:port`.
        ValueError: the address is beyond loopback and there is no `ca`.
        OSError: the file of `ca` cannot be read.
    """
    local = is_loopback(endpoint)
    if ca is not None:
        credentials = grpc.ssl_channel_credentials(ca.read_bytes() if isinstance(ca, Path) else ca)
        named = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
        channel = grpc.aio.secure_channel(endpoint, credentials, options=(*OPTIONS, *named))
    elif local:
        channel = grpc.aio.insecure_channel(endpoint, options=OPTIONS)
    else:
        raise ValueError(f"'{endpoint}' is beyond this machine: give the yard's root certificate, so that TLS is used")
    return _AuthorizedChannel(channel, token if callable(token) else lambda: token)


class _AuthorizedCall:
    """A method of a stub that adds the token to its metadata."""

    def __init__(self, method: Callable[..., Any], token: Callable[[], str]) -> None:
        self._method = method
        self._token = token

    def __call__(self, *args: Any, metadata: Sequence[tuple[str, str | bytes]] = (), **kwargs: Any) -> Any:
        return self._method(*args, metadata=(*metadata, ("authorization", f"Bearer {self._token()}")), **kwargs)


class _AuthorizedChannel(grpc.aio.Channel):
    """Wraps methods instead of intercepting calls: grpc.aio runs every intercepted call in a task of its own."""

    def __init__(self, channel: grpc.aio.Channel, token: Callable[[], str]) -> None:
        self._channel = channel
        self._token = token

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _AuthorizedCall(self._channel.unary_unary(*args, **kwargs), self._token)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _AuthorizedCall(self._channel.unary_stream(*args, **kwargs), self._token)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _AuthorizedCall(self._channel.stream_unary(*args, **kwargs), self._token)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _AuthorizedCall(self._channel.stream_stream(*args, **kwargs), self._token)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> _AuthorizedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
