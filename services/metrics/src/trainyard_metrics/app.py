"""The metrics ingestor, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry
from servicekit.events import EventLog
from servicekit.slots import Slots
from servicekit.store import Store
from trainyard_protos.v1 import metrics_pb2 as pb
from trainyard_protos.v1.admin_pb2_grpc import add_MetricsAdminServiceServicer_to_server
from trainyard_protos.v1.metrics_pb2_grpc import add_MetricsServiceServicer_to_server

from trainyard_metrics.admin import MetricsAdminServicer
from trainyard_metrics.backups import Backups
from trainyard_metrics.bells import Bells
from trainyard_metrics.counters import Counters
from trainyard_metrics.exporter import RunsCollector
from trainyard_metrics.reading import Reader
from trainyard_metrics.remaking import Remaker
from trainyard_metrics.removal import Removal
from trainyard_metrics.retention import Retention
from trainyard_metrics.runlogs import RunLogs
from trainyard_metrics.servicer import MetricsServicer
from trainyard_metrics.settings import Settings
from trainyard_metrics.summaries import Summaries
from trainyard_metrics.tables import EventRow
from trainyard_metrics.upkeep import Upkeep

MIGRATIONS = Path(__file__).parent / "migrations"


class Metrics:
    """Stores runs: records below `home/runs`, everything else in the database.

    Args:
        home: the yard's folder.
        database_url: `sqlite:///path` or `postgresql+psycopg://...`.
        registry: where its counters are registered; one of its own without.
        read_only: it answers reads, next to the ingestor that writes, if there is one, and changes no file.
    """

    name = "metrics"

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
        self._bells = Bells()
        self._keeper: asyncio.Task[None] | None = None
        self._store = Store(database_url, migrations=MIGRATIONS, name=self.name, read_only=read_only)
        counters = Counters(self.registry)
        self._logs = RunLogs(home / "runs", settings, counters, self._stored, read_only=read_only)
        self._reader = Reader(self._logs, settings.query_threads)
        self._summaries = Summaries(self._store, settings, Remaker(self._store, self._reader))
        self.registry.register(RunsCollector(self._summaries, settings))
        self._removal = removal = Removal(self._store, self._logs, self._summaries)
        upkeep = Upkeep(self._logs, settings)
        events = EventLog(EventRow)
        self._retention = Retention(self._store, removal, upkeep, settings)
        log_slots = Slots(settings.max_log_readers, settings.log_reader_idle_s, counters.log_readers.set)
        self._servicer = MetricsServicer(
            self._store,
            self._logs,
            self._reader,
            self._summaries,
            removal,
            self._bells,
            log_slots,
            settings,
            events,
            upkeep,
        )
        backups = Backups(self._store, upkeep, self._summaries, home)
        self._admin = MetricsAdminServicer(self._store, upkeep, self._retention, backups, self._summaries, home, events)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds `MetricsService` and `MetricsAdminService` to a server that was not started yet."""
        add_MetricsServiceServicer_to_server(self._servicer, server)
        add_MetricsAdminServiceServicer_to_server(self._admin, server)

    async def start(self) -> None:
        """Opens the database; unless it only reads, finishes removals and summaries that a crash cut short."""
        await self._store.open()
        await self._summaries.start()
        if self._store.read_only:
            return
        await self._logs.start()
        await self._removal.resume()
        self._keeper = asyncio.create_task(self._retention.keep(), name="retention of runs")

    async def stop(self) -> None:
        """Stores what is staged, closes files and database."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._summaries.cease()
        await self._logs.close()
        await self._summaries.finish()
        self._reader.close()
        await self._store.close()

    def _stored(self, run_id: str, requests: Sequence[pb.AppendRequest]) -> None:
        self._summaries.on_stored(run_id, requests)
        self._bells.ring(run_id)
