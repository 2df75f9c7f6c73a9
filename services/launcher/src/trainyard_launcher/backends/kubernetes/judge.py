"""Finds the machines that are lost: by what the cluster says of them, their leases, and the silence of their agents.

nodes' readiness, silence -> leases of the silent machines and of one that is well -> `losses` judges -> lost | held
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Set

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from trainyard.cluster import Api

from trainyard_launcher.backends.kubernetes import losses
from trainyard_launcher.backends.kubernetes.leases import Leases
from trainyard_launcher.backends.kubernetes.losses import Judgement, Silences

logger = logging.getLogger(__name__)

_LEASE_S = 20  # two renewals that did not come
_STANDSTILL_S = 5
HELD = "MachinesHeld"
HELD_MESSAGE = (
    "machine {} seems lost, but so do too many others at once, or no agent is heard at all: that is taken for trouble "
    "of the network or of the cluster, and nothing is given up; if the machine is lost for good: kubectl delete node {}"
)


class Judge(Collector):
    """Lives on the loop's thread; shows Prometheus what it found.

    Args:
        limit_s: how long counts as silence of an agent.
        pool: of this launcher.
    """

    def __init__(self, api: Api, limit_s: float, pool: str) -> None:
        self._leases, self._limit_s, self._pool = Leases(api, _LEASE_S), limit_s, pool
        self.gone: Set[str] = frozenset()
        """Machines that were found to be lost while Kubernetes still calls them ready, and sends pods there."""
        self._witness: str | None = None
        self._known: Set[str] = frozenset()
        self._judged, self._there_since = math.inf, -math.inf
        self._held = 0
        self._lost_total = 0

    async def judge(self, ready: Mapping[str, bool], silent_s: Silences, now: float) -> Judgement:
        """What became of the machines that run agents; to be asked every few seconds.

        Args:
            ready: whether each node of the cluster is.
            silent_s: for how long each agent has said nothing.
            now: on a clock that only goes forward.
        """
        silent_s = self._believed(ready, silent_s, now)
        # Half of the silence that counts is enough to begin to look: what the leases say takes time to be seen.
        doubtful = losses.silent(silent_s, self._limit_s / 2) | self.gone
        wells = sorted(name for name, well in ready.items() if well and name not in doubtful)
        if self._witness not in wells:  # another one would have to be watched for long before it says anything
            self._witness = wells[0] if wells else None
        many = losses.disrupted({name: name not in doubtful for name in ready})
        witness = None if many else self._witness
        await self._leases.look(doubtful, witness, now)
        stale = self._leases.stale(doubtful, witness)
        found = losses.judge(ready, stale, silent_s, self._limit_s)
        self.gone = frozenset(name for name in self.gone | found.lost if name in stale and ready.get(name, False))
        self._count(found)
        return found

    def _believed(self, ready: Mapping[str, bool], silent_s: Silences, now: float) -> Silences:
        """Silences as far as this process was there to hear, of machines that are or were nodes: one that was never
        seen is newer than what is known of the nodes."""
        # More than this and it stood still, or waited for an API server that hangs.
        if now - self._judged > max(self._limit_s / 2, _STANDSTILL_S):
            self._there_since = now
        self._judged = now
        self._known = ready.keys() | (self._known & silent_s.keys())
        most_s = now - self._there_since
        return {
            name: [min(each, most_s) for each in agents] for name, agents in silent_s.items() if name in self._known
        }

    def _count(self, found: Judgement) -> None:
        if bool(found.held) != bool(self._held):
            logger.warning("many machines seem lost at once", extra={"machines": len(found.held)})
        self._held = len(found.held)
        self._lost_total += len(found.lost)

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        held = GaugeMetricFamily(
            "trainyard_launcher_machines_held",
            "Machines that seem lost and are not given up, because too many do at once",
            labels=["pool"],
        )
        held.add_metric([self._pool], self._held)
        yield held
        lost = CounterMetricFamily(
            "trainyard_launcher_machines_lost", "Machines of which agents were given up", labels=["pool"]
        )
        lost.add_metric([self._pool], self._lost_total)
        yield lost
