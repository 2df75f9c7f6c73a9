"""Hosts and ports in one text, IPv6 addresses among them."""

from __future__ import annotations

import pytest
from trainyard import channel, endpoints, errors
from trainyard.client import AsyncClient


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "fe80::1%eth0", "yard.example.com"])
def test_host_and_port_are_told_apart_again(host: str) -> None:
    assert endpoints.split_host_port(endpoints.join_host_port(host, 7001)) == (host, 7001)


@pytest.mark.parametrize(
    "text", ["", "7001", ":7001", "host", "host:", "host:x", "host:65536", "::1:7001", "[::1]", "[host]:1", "a b:1"]
)
async def test_what_is_not_host_and_port_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(endpoints.InvalidEndpoint, match=r"is not host:port.*\[::1\]:7001"):
        channel.connect(text, "a-token")
    if text:  # without one a client looks for the yard of this machine
        with pytest.raises(errors.InvalidArgument, match="is not host:port") as refused:
            AsyncClient(text, token="a-token")
        assert "TRAINYARD_CA_FILE" not in refused.value.hint
