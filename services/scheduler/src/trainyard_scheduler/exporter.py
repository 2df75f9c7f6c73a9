"""What the scheduler shows Prometheus: numbers of the index, read when they are asked for.

A scrape is encoded on a thread of its own while the loop goes on: whatever is walked here is copied first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from servicekit.outbox import Publisher

from trainyard_scheduler.domain.admission import Amount
from trainyard_scheduler.domain.states import ENDED, JobState
from trainyard_scheduler.index import Index, Wait
from trainyard_scheduler.live_pools import LivePool
from trainyard_scheduler.tally import REASONS, EndedAttempt

_NS_PER_S = 1e9
_DEFAULT_QUEUE = "default"


class SchedulerCollector(Collector):
    """Jobs, queues, pools, and what has ended."""

    def __init__(self, index: Index, publisher: Publisher) -> None:
        self._index = index
        self._publisher = publisher

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        pools = list(self._index.pools.values())
        yield self._jobs()
        yield GaugeMetricFamily(
            "trainyard_outbox_backlog", "Messages that wait to be sent", value=self._publisher.backlog
        )
        yield from self._queues()
        yield from _machines(pools)
        yield from self._ended(pools)

    def _jobs(self) -> Metric:
        jobs = GaugeMetricFamily("trainyard_jobs", "Jobs by state", labels=["state"])
        for state in JobState:
            jobs.add_metric([state.name.lower()], self._index.states[state])
        return jobs

    def _queues(self) -> Iterator[Metric]:
        waiting = self._index.waits()
        counts = Counter((job.queue, why) for why, job in waiting)
        oldest = {queue: self._index.clock.utc_ns() for queue in {_DEFAULT_QUEUE, *(job.queue for _, job in waiting)}}
        for why, job in waiting:
            if why is Wait.ROOM:
                oldest[job.queue] = min(oldest[job.queue], job.since_ns)
        jobs = GaugeMetricFamily(
            "trainyard_queue_jobs", "Queued jobs by what they wait for", labels=["queue", "waits_for"]
        )
        age = GaugeMetricFamily(
            "trainyard_queue_oldest_seconds", "How long the oldest job has waited for room", labels=["queue"]
        )
        now = self._index.clock.utc_ns()
        for queue, since_ns in oldest.items():
            age.add_metric([queue], max(0.0, (now - since_ns) / _NS_PER_S))
            for why in Wait:
                jobs.add_metric([queue, why], counts[queue, why])
        yield from (jobs, age)

    def _ended(self, pools: list[LivePool]) -> Iterator[Metric]:
        tally = self._index.tally
        yield CounterMetricFamily("trainyard_admissions", "Attempts that got machines", value=tally.admissions)
        jobs = CounterMetricFamily("trainyard_jobs_ended", "Jobs that ended, by how", labels=["state"])
        for state in sorted(ENDED):
            jobs.add_metric([state.name.lower()], tally.jobs[state])
        yield jobs
        yield _attempts(dict(tally.attempts), pools)


def _attempts(counts: dict[EndedAttempt, int], pools: list[LivePool]) -> Metric:
    family = CounterMetricFamily(
        "trainyard_attempts_ended",
        "Attempts that ended, by why and whether their workers ever ran",
        labels=["pool", "reason", "ran"],
    )
    # From 0 on, so that the first one is an increase.
    known = {EndedAttempt(pool.name, reason, ran): 0 for pool in pools for reason in REASONS for ran in (False, True)}
    for each, count in (known | counts).items():
        family.add_metric([each.pool, each.reason, "yes" if each.ran else "no"], count)
    return family


def _machines(pools: list[LivePool]) -> Iterator[Metric]:
    alive = GaugeMetricFamily("trainyard_pool_alive", "Whether a pool's launcher is heard of", labels=["pool"])
    labels = ["pool", "machine", "resource"]
    total = GaugeMetricFamily("trainyard_machine_capacity", "Cores, bytes and GPUs of a machine", labels=labels)
    free = GaugeMetricFamily("trainyard_machine_free", "What of them is not given to jobs", labels=labels)
    for pool in pools:
        alive.add_metric([pool.name], pool.alive)
        totals = {name: machine.total for name, machine in pool.offer.machines.items()}
        for family, machines in ((total, totals), (free, pool.room.free)):
            for machine, amount in list(machines.items()) if pool.alive else ():
                for resource, value in _resources(amount):
                    family.add_metric([pool.name, machine, resource], value)
    yield from (alive, total, free)


def _resources(amount: Amount) -> tuple[tuple[str, float], ...]:
    return ("cpu", amount.cpu_milli / 1000), ("memory", amount.memory_bytes), ("gpu", amount.gpu)
