"""What the store counts for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class Counters:
    """Counters of one artifact store."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.versions = Counter("trainyard_artifact_versions", "Versions made, by kind", ["kind"], registry=registry)
        self.chunks_stored = Counter("trainyard_artifact_chunks_stored", "Chunks that were new", registry=registry)
        self.bytes_received = Counter(
            "trainyard_artifact_received_bytes", "Bytes of chunks received and stored", registry=registry
        )
        self.bytes_receiving = Gauge(
            "trainyard_artifact_receiving_bytes", "Bytes of chunks in memory on their way to disk", registry=registry
        )
        self.bytes_sent = Counter("trainyard_artifact_sent_bytes", "Bytes of chunks sent", registry=registry)
        self.chunks_damaged = Counter(
            "trainyard_artifact_chunks_damaged", "Reads that found a chunk damaged or gone", registry=registry
        )
        self.chunks_collected = Counter(
            "trainyard_artifact_chunks_collected", "Unused chunks removed", registry=registry
        )
        self.bytes_freed = Counter("trainyard_artifact_freed_bytes", "Bytes of packs removed", registry=registry)
        self.versions_expired = Counter(
            "trainyard_artifact_versions_expired", "Versions that retention removed", registry=registry
        )
        self.collections_failed = Counter(
            "trainyard_artifact_collections_failed", "Collections that failed", registry=registry
        )
