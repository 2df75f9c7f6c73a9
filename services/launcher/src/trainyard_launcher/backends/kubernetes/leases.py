"""Whether kubelets still renew their leases, asked only of machines whose agents are silent.

A kubelet renews its lease every ten seconds, so a machine that is gone is known before Kubernetes calls it not ready,
which takes 50 s. Only this process' clock counts: a lease is stale when it was seen unchanged for so long, look after
look, while that of another machine was renewed when this one was overdue. So neither clocks that differ nor an API
server that hangs, was away, or takes no writes make a lease stale.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from trainyard.cluster import Api, ApiError

logger = logging.getLogger(__name__)

_PATH = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_LOOK_S = 3.0
_GAP_S = 4 * _LOOK_S
_OVERDUE = 0.55  # of the time after which a lease is stale, which is that of two renewals


@dataclass(slots=True)
class _Seen:
    """What was seen of a lease: its stamp, since when at the latest it is the same, and when it was last looked at."""

    stamp: str
    since: float
    looked: float
    stale_s: float
    renewals: int = 0

    def see(self, stamp: str, asked: float, answered: float) -> None:
        if asked - self.looked > _GAP_S:
            self.stamp, self.since, self.renewals = stamp, answered, 0
        elif stamp != self.stamp:
            self.stamp, self.since, self.renewals = stamp, answered, self.renewals + 1
        self.looked = asked

    def is_stale(self, other: _Seen) -> bool:
        """Whether it is unchanged for too long, while the other one was renewed when this one was overdue."""
        overdue_s = other.since - _LOOK_S - self.since  # a renewal may be as old as one look when it is seen
        return self.looked - self.since >= self.stale_s and overdue_s > _OVERDUE * self.stale_s


class Leases:
    """Lives on the loop's thread.

    Args:
        limit_s: unchanged for so long is stale, where kubelets renew their leases as often as they do by default.
        clock: in seconds.
    """

    def __init__(self, api: Api, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._limit_s, self._clock = api, limit_s, clock
        self._seen: dict[str, _Seen] = {}
        self._looked = float("-inf")
        self._allowed = True

    async def look(self, machines: Set[str], witness: str | None, now: float) -> None:
        """Looks at the leases of machines and of the witness, which is well; forgets all others.

        Without machines, without a witness or without the right to it nothing is asked.
        """
        wanted = {*machines, witness} if machines and witness is not None and self._allowed else set()
        self._seen = {name: seen for name, seen in self._seen.items() if name in wanted}
        if wanted and now - self._looked >= _LOOK_S:
            self._looked = now
            await asyncio.gather(*(self._read(str(name), now) for name in wanted))

    async def _read(self, name: str, now: float) -> None:
        began = self._clock()
        try:
            async with asyncio.timeout(_GAP_S):
                lease = await self._api.get(f"{_PATH}/{name}")
        except TimeoutError:
            return
        except ApiError as error:
            if error.status in (401, 403) and self._allowed:
                self._allowed = False
                logger.warning("leases of nodes are not read: lost machines are known later", extra={"why": str(error)})
            return
        spec, answered = lease.get("spec", {}), now + self._clock() - began
        stamp = str(spec.get("renewTime", ""))
        # A kubelet renews four times within its lease's duration.
        stale_s = max(self._limit_s, float(spec.get("leaseDurationSeconds", 0)) / 2)
        self._seen.setdefault(name, _Seen(stamp, answered, now, stale_s)).see(stamp, now, answered)

    def stale(self, machines: Iterable[str], witness: str | None) -> Set[str]:
        """Those of the machines whose lease is stale; none unless the witness renewed its own meanwhile."""
        other = self._seen.get(witness or "")
        if other is None or not other.renewals:
            return frozenset()
        found = ((name, self._seen.get(name)) for name in machines)
        return frozenset(name for name, seen in found if seen and seen.is_stale(other))
