"""Calls that were refused for their token: counted in a metric and logged, and nothing else is kept of them.

Either the token is not valid, or it is not for this call. Whoever can reach the port can cause them, in any
number. So the log has at most one line per peer and minute, with the number of refused calls that it leaves out, and
both its lines and what is remembered are bounded over all peers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

from servicekit.peers import host_of

logger = logging.getLogger(__name__)

_WINDOW_S = 60.0
_MAX_PEERS = 32  # that get a line of their own in one window


@dataclass(slots=True)
class _Refused:
    """The refused calls of one peer that no line has told yet; method and reason are those of the last one."""

    until: float
    method: str = ""
    reason: str = ""
    omitted: int = 0


class Refusals:
    """Counts and logs refused tokens.

    Args:
        registry: where the metric is shown.
        clock: seconds that only grow.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._counter = Counter(
            "trainyard_refused_tokens", "Calls refused for their token", ["method", "reason"], registry=registry
        )
        self._clock = clock
        self._peers: dict[str, _Refused] = {}
        self._others = _Refused(until=0.0)
        self._timer: asyncio.TimerHandle | None = None

    def add(self, peer: str, method: str, reason: str) -> None:
        """Counts one refused call; must run in the event loop.

        Args:
            peer: gRPC's name of the caller's address.
            method: a method that exists, so that callers cannot make up label values.
            reason: of the error.
        """
        self._counter.labels(method, reason).inc()
        host = host_of(peer)
        known = self._peers.get(host)
        if known is None and len(self._peers) < _MAX_PEERS:
            self._peers[host] = _Refused(self._clock() + _WINDOW_S)
            _log(host, method, reason, 0)
        else:
            known = known or self._others
            known.method, known.reason = method, reason
            known.omitted += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WINDOW_S, self._on_timer)

    def report_omitted(self) -> None:
        """Logs the calls that the last minute's lines left out, and forgets peers that have stopped."""
        now = self._clock()
        for host, refused in list(self._peers.items()):
            if refused.until > now:
                continue
            if refused.omitted:
                _log(host, refused.method, refused.reason, refused.omitted - 1)
                refused.omitted, refused.until = 0, now + _WINDOW_S
            else:
                del self._peers[host]
        if self._others.omitted and self._others.until <= now:
            _log("other peers", self._others.method, self._others.reason, self._others.omitted - 1)
            self._others = _Refused(until=now + _WINDOW_S)

    def close(self) -> None:
        """Logs the calls that no line has counted yet, and ends the timer: the process stops."""
        if self._timer is not None:
            self._timer.cancel()
        for host, refused in (*self._peers.items(), ("other peers", self._others)):
            if refused.omitted:
                _log(host, refused.method, refused.reason, refused.omitted - 1)
        self._peers.clear()
        self._others = _Refused(until=0.0)

    def _on_timer(self) -> None:
        self.report_omitted()
        busy = self._peers or self._others.omitted
        self._timer = asyncio.get_running_loop().call_later(_WINDOW_S, self._on_timer) if busy else None


def _log(peer: str, method: str, reason: str, omitted: int) -> None:
    logger.warning(
        "refused a call for its token",
        extra={"peer": peer[:128], "method": method, "reason": reason, "omitted": omitted},
    )
