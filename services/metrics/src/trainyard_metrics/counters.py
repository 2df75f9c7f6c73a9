"""What the ingestor counts for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


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
        self.waiting_bytes = Gauge(
            "trainyard_metrics_waiting_bytes", "Bytes of all streams that wait to be stored", registry=registry
        )
        self.waiting_limit = Gauge(
            "trainyard_metrics_waiting_bytes_limit", "Bytes beyond which streams are not read", registry=registry
        )
        self.log_readers = Gauge(
            "trainyard_metrics_log_readers", "Readers of lines that hold files and decoded lines", registry=registry
        )
        self.durable_seconds = Histogram(
            "trainyard_metrics_durable_seconds",
            "Time from a batch's arrival until it is durable",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=registry,
        )
        self.write_errors = Counter(
            "trainyard_metrics_write_errors", "Groups that were not written", ["reason"], registry=registry
        )
        for reason in ("DiskFull", "StorageFailed"):
            self.write_errors.labels(reason)  # from 0 on, so that the first one is an increase
        self.open_runs = Gauge("trainyard_metrics_open_runs", "Runs whose files are open", registry=registry)
        self.compaction_seconds = Histogram(
            "trainyard_metrics_compaction_seconds",
            "Time of compacting a segment, or of merging files",
            ["kind"],
            buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
            registry=registry,
        )
        self.compactions_failed = Counter(
            "trainyard_metrics_compactions_failed", "Compactions that changed nothing", registry=registry
        )
        self.compactions_waiting = Gauge(
            "trainyard_metrics_compactions_waiting", "Runs that wait for their compaction", registry=registry
        )
