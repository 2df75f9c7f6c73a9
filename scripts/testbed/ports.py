"""Ports for servers of tests: every process has a block of its own, so that none is taken between choice and use.

A process holds its block by the block's first port: it is bound, nobody listens on it, and the kernel gives it back
when the process ends, however it ends.
"""

from __future__ import annotations

import functools
import itertools
import random
import socket
from collections.abc import Iterator

_PORTS = range(20_000, 32_000)  # below those the kernel gives to outgoing connections
_BLOCK = 100


class _Block:
    """A block of ports that no other process takes from."""

    def __init__(self) -> None:
        firsts = list(_PORTS[::_BLOCK])
        random.shuffle(firsts)
        for first in firsts:
            held = socket.socket()
            try:
                held.bind(("127.0.0.1", first))
            except OSError:
                held.close()
                continue
            held.detach()  # it stays open without an object that would have to be closed
            self._next: Iterator[int] = itertools.cycle(range(first + 1, first + _BLOCK))
            return
        raise RuntimeError(f"all blocks of ports in {_PORTS} are taken")

    def take(self) -> int:
        for port in itertools.islice(self._next, _BLOCK - 1):
            if _is_free(port):
                return port
        raise RuntimeError(f"all {_BLOCK - 1} ports of this process's block are taken")


@functools.cache
def _block() -> _Block:
    return _Block()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses, and that neither another process nor an outgoing connection takes."""
    return _block().take()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
