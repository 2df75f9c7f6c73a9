"""What the launcher shows Prometheus: its attempts by phase, and for how long their agents have said nothing.

A scrape is encoded on a thread of its own while the loop goes on; the registry hands out copies.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trainyard_launcher.attempts import Attempt, Phase
from trainyard_launcher.registry import Registry


class LauncherCollector(Collector):
    """Reads the registry of attempts.

    Args:
        attempts: those that are not over.
        pool: of this launcher.
    """

    def __init__(self, attempts: Registry, pool: str) -> None:
        self._attempts = attempts
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        attempts = list(self._attempts)
        phases = Counter(_phase(attempt) for attempt in attempts)
        by_phase = GaugeMetricFamily(
            "trainyard_launcher_attempts", "Attempts by how far all of their nodes are", labels=["pool", "phase"]
        )
        for phase in Phase:
            by_phase.add_metric([self._pool, phase.name.lower()], phases[phase])
        yield by_phase
        yield _silence(attempts)


def _silence(attempts: list[Attempt]) -> Metric:
    family = GaugeMetricFamily(
        "trainyard_attempt_silence_seconds",
        "Time since the last word of the attempt's most silent agent, or since its start when it was never heard",
        labels=["workspace", "job", "job_name", "attempt", "heard"],
    )
    now = time.monotonic()
    for attempt in attempts:
        facts = attempt.facts
        silent = [node for node in attempt.nodes if node.phase is not Phase.ENDED]
        if silent:
            longest = min(silent, key=lambda node: node.heard)
            labels = [facts.workspace, facts.job_id, facts.job_name, str(facts.fence)]
            family.add_metric([*labels, "yes" if longest.heard_ns else "no"], max(0.0, now - longest.heard))
    return family


def _phase(attempt: Attempt) -> Phase:
    return min(node.phase for node in attempt.nodes)
