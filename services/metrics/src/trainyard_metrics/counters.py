"""What the ingestor counts for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class Counters:
    """Counters of one metrics ingestor."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.records = Counter("trainyard_metrics_records", "Rows and lines stored", ["kind"], registry=registry)
        self.points = Counter("trainyard_metrics_points", "Points stored", registry=registry)
        self.skipped = Counter("trainyard_metrics_skipped", "Records that were there already", registry=registry)
        self.refused_points = Counter(
            "trainyard_metrics_refused_points",
            "Points whose name was beyond the limit, or not allowed",
            registry=registry,
        )
        self.holes = Counter(
            "trainyard_metrics_holes", "Batches refused because records before them lack", registry=registry
        )
        self.bytes = Counter("trainyard_metrics_written_bytes", "Bytes written to records files", registry=registry)
        self.syncs = Counter("trainyard_metrics_syncs", "Groups written, each with one fsync", registry=registry)
        self.damaged = Counter("trainyard_metrics_damaged", "Records files found damaged", registry=registry)
        self.torn = Counter(
            "trainyard_metrics_torn", "Unfinished writes cut off when a file was opened", registry=registry
        )
