"""Ports that are still free when they are used.

The kernel takes the ports of outgoing connections from a range of its own. A port of that range may be gone between the
moment it is chosen and the moment it is bound, or bound again after a restart; and a client that keeps calling a
server's port while it is down can even get itself for an answer. So ports that are to last come from below that range.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Iterator

LASTING = range(10_000, 20_000)
_TRIES = 200


def candidates() -> Iterator[int]:
    """Some lasting ports, in an order of their own each time."""
    yield from random.sample(LASTING, _TRIES)


def free_port(taken: Collection[int] = ()) -> int:
    """A lasting port of loopback that nobody uses and that is not in `taken`.

    Raises:
        OSError: among 200 there is none.
    """
    for port in candidates():
        if port not in taken and _is_free(port):
            return port
    raise OSError(f"no free port among {_TRIES} of {LASTING.start} to {LASTING.stop - 1} on 127.0.0.1")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
