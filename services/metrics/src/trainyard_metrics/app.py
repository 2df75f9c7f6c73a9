"""The metrics ingestor, put together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry
from servicekit.store import Store
from trainyard_protos.v1.metrics_pb2_grpc import add_MetricsServiceServicer_to_server

from trainyard_metrics.bells import Bells
from trainyard_metrics.counters import Counters
from trainyard_metrics.runlogs import RunLogs
from trainyard_metrics.servicer import MetricsServicer
from trainyard_metrics.settings import Settings

MIGRATIONS = Path(__file__).parent / "migrations"


class Metrics:
    """Stores runs: records below `home/runs`, everything else in the database.

    Args:
        home: the yard's folder.
        database_url: `sqlite:///path` or `postgresql+psycopg://...`.
        registry: where its counters are registered; one of its own without.
    """

    name = "metrics"

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
        bells = Bells()
        self._store = Store(database_url, migrations=MIGRATIONS, name=self.name)
        self._logs = RunLogs(home / "runs", settings, Counters(self.registry), lambda run_id, _: bells.ring(run_id))
        self._servicer = MetricsServicer(self._store, self._logs, bells, settings)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds `MetricsService` to a server that was not started yet."""
        add_MetricsServiceServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Opens the database; finishes removals that a crash cut short."""
        await self._store.open()
        await asyncio.to_thread(self._logs.clean)

    async def stop(self) -> None:
        """Stores what is staged, closes files and database."""
        await self._logs.close()
        await self._store.close()
