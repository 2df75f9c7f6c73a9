"""The newest training values for Prometheus: of runs that changed lately, as far as there is room.

Values are read from summaries, so a scrape costs neither a query nor a point.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trainyard_metrics.settings import Settings
from trainyard_metrics.summaries import Summaries
from trainyard_metrics.tracked import Tracked

_RUN = ("workspace", "job", "run", "attempt")


class RunsCollector(Collector):
    """Latest values and steps of recent runs."""

    def __init__(self, summaries: Summaries, settings: Settings) -> None:
        self._summaries = summaries
        self._settings = settings

    def describe(self) -> Iterator[Metric]:
        """Names alone: registering it must not read summaries."""
        yield from self._families()

    def collect(self) -> Iterator[Metric]:
        """One scrape, the runs that changed last first."""
        value, step, updated, left_out = self._families()
        room = self._settings.max_exported_series
        skipped = 0
        for tracked in self._summaries.recent(self._settings.exported_s):
            size = len(tracked.summary)
            if size > room:
                skipped += size
                continue
            room -= size
            _add(tracked, size, value, step, updated)
        left_out.add_metric((), skipped)
        yield from (value, step, updated, left_out)

    def _families(self) -> tuple[GaugeMetricFamily, ...]:
        return (
            GaugeMetricFamily("trainyard_run_value", "Newest value of a series", labels=(*_RUN, "name", "rank")),
            GaugeMetricFamily("trainyard_run_step", "Highest step of a run", labels=_RUN),
            GaugeMetricFamily("trainyard_run_updated_seconds", "Time of a run's newest point, Unix", labels=_RUN),
            GaugeMetricFamily("trainyard_run_series_left_out", "Series of recent runs beyond the limit"),
        )


def _add(
    tracked: Tracked, size: int, value: GaugeMetricFamily, step: GaugeMetricFamily, updated: GaugeMetricFamily
) -> None:
    run = (tracked.run.workspace, tracked.run.job_id, tracked.run.id, str(tracked.run.fence))
    entries = tracked.summary.entries[:size]  # series that are added meanwhile come with the next scrape
    ranks, values = entries["rank"].tolist(), entries["last_value"].tolist()
    for name, rank, newest in zip(tracked.summary.names[:size], ranks, values, strict=True):
        value.add_metric((*run, name, str(rank)), newest)
    of_workers = entries["last_step"][entries["rank"] >= 0]
    if len(of_workers):
        step.add_metric(run, int(of_workers.max()))
    updated.add_metric(run, tracked.summary.last_time_ns / 1e9)
