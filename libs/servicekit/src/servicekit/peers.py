"""Addresses of callers, as gRPC names them."""

from __future__ import annotations

from urllib.parse import unquote


def host_of(peer: str) -> str:
    """A peer without its port, for instance "ipv4:10.0.0.1": each connection has another port."""
    return peer.rpartition(":")[0] or peer or "unknown"  # gRPC forgets the peer of a call that has ended


def address_of(peer: str) -> str:
    """The address alone, for instance "10.0.0.1" or "::1"."""
    return unquote(host_of(peer).partition(":")[2]).strip("[]") or peer
