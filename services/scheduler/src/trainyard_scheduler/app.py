"""The scheduler, put together."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from prometheus_client import CollectorRegistry, Histogram
from servicekit.clock import CLOCK, Clock
from servicekit.events import AdminEvent, Subject
from servicekit.outbox import Publisher
from servicekit.store import Store
from trainyard_protos.v1 import admin_pb2_grpc, scheduler_pb2_grpc

from trainyard_scheduler import references
from trainyard_scheduler.admin import DATABASE, SchedulerAdminServicer
from trainyard_scheduler.attempts_servicer import AttemptServicer
from trainyard_scheduler.duties import Admitter, TimerDuties
from trainyard_scheduler.exporter import SchedulerCollector
from trainyard_scheduler.index import Index
from trainyard_scheduler.ledger import Ledger
from trainyard_scheduler.rebuild import rebuild
from trainyard_scheduler.servicer import SchedulerServicer
from trainyard_scheduler.settings import Settings
from trainyard_scheduler.tables import OutboxTable
from trainyard_scheduler.transitions import steer
from trainyard_scheduler.watch import EventHub

if TYPE_CHECKING:
    from celery import Celery

MIGRATIONS = Path(__file__).parent / "migrations"


class Scheduler:
    """Decides what runs. A `servicekit.service.Service`.

    Args:
        home: of the yard; used when `database_url` is empty.
        database_url: `sqlite:///path` or `postgresql+psycopg://...`; "" means `scheduler.db` in the home.
        celery: where messages to launchers go; None: it only reads, next to the scheduler that writes, if there is one.
        settings: bounds and times.
        registry: where metrics are shown.
        clock: where time comes from.
    """

    name = "scheduler"

    def __init__(
        self,
        *,
        home: Path,
        database_url: str,
        celery: Celery | None,
        settings: Settings,
        registry: CollectorRegistry | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self._settings = settings
        self._home = home
        url = database_url or f"sqlite:///{home / DATABASE}"
        self._store = Store(url, migrations=MIGRATIONS, name=self.name, standby=True, read_only=celery is None)
        self._index = Index(clock, admits=celery is not None)
        self._hub = EventHub()
        self._publisher = Publisher(self._store, OutboxTable, celery)
        self._ledger = Ledger(self._store, self._index, self._hub, self._publisher, clock)
        registry = registry or CollectorRegistry()
        waited = Histogram(
            "trainyard_admission_seconds",
            "From submission to the first admission",
            buckets=(0.01, 0.1, 1, 10, 60, 600, 3600, 86400),
            registry=registry,
        )
        registry.register(SchedulerCollector(self._index, self._publisher))
        self._admitter = Admitter(self._index, self._ledger, settings, waited)
        self._duties = TimerDuties(self._index, self._ledger, settings)
        self._admitting: asyncio.Task[None] | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Adds its services to a server that has not started."""
        users = SchedulerServicer(self._store, self._ledger, self._index, self._hub, self._settings)
        launchers = AttemptServicer(self._store, self._ledger, self._index, self._settings)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(users, server)
        scheduler_pb2_grpc.add_AttemptServiceServicer_to_server(launchers, server)
        admin_pb2_grpc.add_SchedulerAdminServiceServicer_to_server(
            SchedulerAdminServicer(self._store, self._ledger, self._home), server
        )

    async def cancel(self, workspace: str, job_id: str, message: str) -> None:
        """Cancels a job on behalf of a client that went away.

        Raises:
            ServiceError: there is no such job, or it is over.
        """
        found = await self._store.read(
            lambda session: references.resolve_job_id(session, workspace or "default", job_id)
        )
        await self._ledger.write(functools.partial(steer.cancel, job_id=found, message=message))

    async def record_shutdown(self, actor: str, message: str) -> None:
        """Records that a user ends the yard.

        Raises:
            ServiceError: the database does not take it.
        """
        about = Subject("Yard", "yard")
        await self._ledger.write(lambda tx: tx.other_event(actor, AdminEvent.SHUTDOWN_REQUESTED, about, message))

    async def start(self) -> None:
        """Opens the database, rebuilds the index, and unless it only reads, continues what the process before did."""
        await self._store.open()
        await self._ledger.open()
        await self._store.read(lambda session: rebuild(session, self._index))
        if self._store.read_only:
            return
        self._publisher.start()
        self._index.timers.start(self._duties.handlers())
        self._admitting = asyncio.create_task(self._admitter.run(), name="admission")

    async def stop(self) -> None:
        """Ends watches, finishes the writes that run, closes the database."""
        self._hub.close()
        await self._index.timers.stop()
        if self._admitting is not None:
            self._admitting.cancel()
            await asyncio.gather(self._admitting, return_exceptions=True)
        await self._publisher.stop()
        await self._store.close()  # answers every write, also one whose outcome a lost database keeps to itself
        await self._ledger.close()
