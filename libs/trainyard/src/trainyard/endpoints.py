"""Addresses as `host:port`, where an IPv6 address stands in brackets: `[::1]:7001`.

The standard library alone.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

_ENDPOINT = re.compile(r"(?:\[(?P<ipv6>[^\s\[\]]*:[^\s\[\]]*)\]|(?P<host>[^\s\[\]:]+)):(?P<port>[0-9]{1,5})")

MAX_PORT = 65535


class InvalidEndpoint(ValueError):
    """A text is not `host:port`."""


def join_host_port(host: str, port: int) -> str:
    """The endpoint of a host, which is a name or an address without brackets, and a port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(endpoint: str) -> tuple[str, int]:
    """Host, without brackets, and port of an endpoint.

    Raises:
        InvalidEndpoint: it is not `host:port`.
    """
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or int(found["port"]) > MAX_PORT:
        raise InvalidEndpoint(
            f"'{endpoint}' is not host:port with a port from 0 to {MAX_PORT}, as in yard.example.com:443 or, for an "
            "IPv6 address, [::1]:7001"
        )
    return found["ipv6"] or found["host"], int(found["port"])


def port_number(text: str) -> int:
    """A port to listen on, 0 to 65535, of an option.

    Raises:
        ArgumentTypeError: it is none; `argparse` adds the name of the option.
    """
    if not text.isascii() or not text.isdigit() or int(text) > MAX_PORT:
        raise ArgumentTypeError(f"'{text}' is not a port; allowed: 0 to {MAX_PORT}")
    return int(text)


def without_brackets(host: str) -> str:
    """`::1` of `[::1]`; other hosts stay as they are."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
