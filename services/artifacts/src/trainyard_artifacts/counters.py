"""What the store counts for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class Counters:
    """Counters of one artifact store."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.versions = Counter("trainyard_artifact_versions", "Versions made, by kind", ["kind"], registry=registry)
        self.chunks_stored = Counter("trainyard_artifact_chunks_stored", "Chunks that were new", registry=registry)
        self.bytes_received = Counter(
            "trainyard_artifact_received_bytes", "Bytes of chunks received", registry=registry
        )
        self.bytes_sent = Counter("trainyard_artifact_sent_bytes", "Bytes of chunks sent", registry=registry)
        self.chunks_damaged = Counter(
            "trainyard_artifact_chunks_damaged", "Reads that found a chunk damaged or gone", registry=registry
        )
        self.chunks_collected = Counter(
            "trainyard_artifact_chunks_collected", "Unused chunks removed", registry=registry
        )
