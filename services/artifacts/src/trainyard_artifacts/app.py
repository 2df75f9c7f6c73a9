"""The artifact store, put together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry
from servicekit.events import EventLog
from servicekit.store import Store
from trainyard.artifacts.allocator import keep_large_blocks
from trainyard_protos.v1.admin_pb2_grpc import add_ArtifactAdminServiceServicer_to_server
from trainyard_protos.v1.artifacts_pb2_grpc import add_ArtifactServiceServicer_to_server

from trainyard_artifacts.admin import ArtifactAdminServicer
from trainyard_artifacts.chunks import Chunks
from trainyard_artifacts.collector import Collector
from trainyard_artifacts.counters import Counters
from trainyard_artifacts.folder import FolderObjects
from trainyard_artifacts.objects import ObjectStore
from trainyard_artifacts.servicer import ArtifactServicer
from trainyard_artifacts.settings import Settings
from trainyard_artifacts.tables import EventRow

MIGRATIONS = Path(__file__).parent / "migrations"


class Artifacts:
    """Stores artifacts: chunks in packs, below `home/packs` or in a bucket; everything else in the database.

    Args:
        home: the yard's folder.
        database_url: `sqlite:///path` or `postgresql+psycopg://...`.
        registry: where its counters are registered; one of its own without.
        read_only: it answers reads, next to the store that writes, if there is one, and changes nothing.
    """

    name = "artifacts"

    def __init__(
        self,
        *,
        home: Path,
        database_url: str,
        settings: Settings | None = None,
        registry: CollectorRegistry | None = None,
        read_only: bool = False,
    ) -> None:
        self.registry = registry or CollectorRegistry()
        settings = settings or Settings()
        counters = Counters(self.registry)
        self.store = Store(database_url, migrations=MIGRATIONS, name=self.name, read_only=read_only)
        self._objects = _objects(home, settings)
        events = EventLog(EventRow)
        self.chunks = chunks = Chunks(self.store, self._objects, settings)
        self._servicer = ArtifactServicer(self.store, chunks, settings, counters, events)
        self.collector = Collector(self.store, self._objects, chunks, settings, counters)
        self._admin = ArtifactAdminServicer(home, self.store, self._objects, chunks, self.collector, events)
        self._collecting: asyncio.Task[None] | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Adds `ArtifactService` and `ArtifactAdminService` to a server that was not started yet."""
        add_ArtifactServiceServicer_to_server(self._servicer, server)
        add_ArtifactAdminServiceServicer_to_server(self._admin, server)

    async def start(self) -> None:
        """Opens the database and, unless it only reads, begins to collect at intervals what nothing needs any more."""
        keep_large_blocks()
        await self.store.open()
        if self.store.read_only:
            return
        self._collecting = asyncio.create_task(self.collector.run(), name="collect artifacts")

    async def stop(self) -> None:
        """Ends collection, finishes writes, closes the database."""
        if self._collecting is not None:
            self._collecting.cancel()
            await asyncio.gather(self._collecting, return_exceptions=True)
        await self.store.close()
        await self._objects.close()


def _objects(home: Path, settings: Settings) -> ObjectStore:
    if not settings.s3_bucket:
        return FolderObjects(home)
    from trainyard_artifacts.s3 import S3Objects  # what a yard with a folder never needs

    return S3Objects(settings)
