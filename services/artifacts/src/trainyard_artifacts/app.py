"""The artifact store, put together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry
from servicekit.store import Store
from trainyard_protos.v1.artifacts_pb2_grpc import add_ArtifactServiceServicer_to_server

from trainyard_artifacts.blobs import DiskBlobStore
from trainyard_artifacts.collector import Collector
from trainyard_artifacts.counters import Counters
from trainyard_artifacts.servicer import ArtifactServicer
from trainyard_artifacts.settings import Settings

MIGRATIONS = Path(__file__).parent / "migrations"


class Artifacts:
    """Stores artifacts: chunks below `home/chunks`, everything else in the database.

    Args:
        home: the yard's folder.
        database_url: `sqlite:///path` or `postgresql+psycopg://...`.
        registry: where its counters are registered; one of its own without.
    """

    name = "artifacts"

    def __init__(
        self,
        *,
        home: Path,
        database_url: str,
        settings: Settings | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.registry = registry or CollectorRegistry()
        settings = settings or Settings()
        counters = Counters(self.registry)
        self._store = Store(database_url, migrations=MIGRATIONS, name=self.name)
        self._blobs = DiskBlobStore(home / "chunks")
        self._servicer = ArtifactServicer(self._store, self._blobs, settings, counters)
        self.collector = Collector(self._store, self._blobs, settings, counters.chunks_collected)
        self._collecting: asyncio.Task[None] | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Adds `ArtifactService` to a server that was not started yet."""
        add_ArtifactServiceServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Opens the database and begins to collect unused chunks at intervals."""
        await self._store.open()
        self._collecting = asyncio.create_task(self.collector.run(), name="collect chunks")

    async def stop(self) -> None:
        """Ends collection, finishes writes, closes the database."""
        if self._collecting is not None:
            self._collecting.cancel()
            await asyncio.gather(self._collecting, return_exceptions=True)
        await self._store.close()
        await asyncio.to_thread(self._blobs.close)
