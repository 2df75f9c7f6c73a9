"""Calls for whoever runs a yard: what is stored, whether it is whole, tidying up, copies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard_protos.v1 import admin_pb2 as pb

from trainyard import errors
from trainyard.client.jobs import JobCalls

if TYPE_CHECKING:
    from trainyard_protos.v1 import scheduler_pb2

    from trainyard.client.answers import BackedUp, Maintained, ServiceEvent, ServiceUsage, Verified

logger = logging.getLogger(__name__)

MAINTAIN_DEADLINE_S = 3600.0


class AdminCalls(JobCalls):
    """What an operator asks. Attempts' tokens are refused."""

    async def usage(self) -> list[ServiceUsage]:
        """How much each service stores, and how much room there is."""
        from trainyard.client.answers import ServiceUsage

        stubs = {"scheduler": self._connection.scheduler_admin, **self._keepers()}
        request = pb.GetUsageRequest()
        calls = (self._connection.call(stub.GetUsage, request) for stub in stubs.values())
        *answers, attempts = await asyncio.gather(*calls, self.attempt_usage())
        return [
            ServiceUsage(service, list(answer.usage), answer.free_bytes, list(answer.unread))
            for service, answer in zip((*stubs, "launcher"), (*answers, attempts), strict=True)
        ]

    async def attempt_usage(self, job_ids: Sequence[str] = ()) -> pb.GetUsageResponse:
        """What the folders of attempts take on disk, by job; what cannot be known is in `unread`.

        Args:
            job_ids: only of these jobs; empty: of all.
        """
        request = pb.GetUsageRequest(job_ids=job_ids)
        try:
            return await self._connection.call(self._connection.launcher.GetUsage, request)
        except errors.YardError as error:  # the pool is away, or of an earlier release
            return pb.GetUsageResponse(unread=[f"the launcher does not say what attempts take: {error}"])

    async def admin_events(self, service: str, *, object_name: str = "") -> AsyncIterator[scheduler_pb2.Event]:
        """What users changed in one service, oldest first; each service keeps the newest 100,000 events.

        Args:
            service: "metrics" or "artifacts"; those of the scheduler are among `events()`.
            object_name: only changes of what has this name, for instance an artifact.
        """
        stub = self._keepers()[service]
        request = pb.ListAdminEventsRequest(workspace=self.workspace, object_name=object_name, page_size=5000)
        while True:
            page = await self._connection.call(stub.ListAdminEvents, request)
            for event in page.events:
                yield event
            if len(page.events) < request.page_size:
                return
            request.after_seq = page.events[-1].seq

    async def all_events(self) -> AsyncIterator[ServiceEvent]:
        """Events of all services, oldest first. A warning is logged for a service whose events cannot be read."""
        from trainyard.client.answers import ServiceEvent

        streams = {"scheduler": self.events(), **{name: self._readable(name) for name in self._keepers()}}
        heads = {service: await anext(stream, None) for service, stream in streams.items()}
        while waiting := [ServiceEvent(service, event) for service, event in heads.items() if event is not None]:
            first = min(waiting, key=lambda each: each.event.time_ns)
            yield first
            heads[first.service] = await anext(streams[first.service], None)

    async def _readable(self, service: str) -> AsyncIterator[scheduler_pb2.Event]:
        try:
            async for event in self.admin_events(service):
                yield event
        except errors.YardError as error:
            logger.warning("events of %s are left out: %s", service, error)

    async def verify(self, *, repair: bool = False) -> AsyncIterator[Verified]:
        """Reads everything that is stored, databases included, and tells what is not as it was written.

        Args:
            repair: save what can be saved; what is damaged is put aside, never deleted.
        """
        from trainyard.client.answers import Verified

        request = pb.VerifyRequest(repair=repair)
        for service, stub in {"scheduler": self._connection.scheduler_admin, **self._keepers()}.items():
            async for answer in self._connection.stream(stub.Verify, request):
                finding = answer.finding if answer.HasField("finding") else None
                yield Verified(service, answer.checked, answer.total, finding)

    async def maintain(self) -> list[Maintained]:
        """Compacts, applies retention and frees space now, instead of when the services would by themselves."""
        from trainyard.client.answers import Maintained

        request, done = pb.MaintainRequest(), []
        for service, stub in self._keepers().items():
            answer = await self._connection.call(stub.Maintain, request, MAINTAIN_DEADLINE_S)
            done.append(Maintained(service, answer.freed_bytes, list(answer.done)))
        return done

    async def backup(self, folder: Path | str) -> AsyncIterator[BackedUp]:
        """Copies everything that the services keep into a new folder, while they work.

        The folder appears when the copy is whole and durable. Put into an empty TRAINYARD_HOME it is a yard again.
        Copies of PostgreSQL databases and S3 buckets are made with those systems' own tools.

        Raises:
            InvalidArgument: the folder is there already and not empty, or cannot be written.
            Conflict: a service's database is not SQLite.
        """
        from trainyard.client.answers import BackedUp
        from trainyard.client.copying import Copy

        copy = Copy(Path(folder))
        try:
            # The scheduler first, artifacts last: what one speaks of is then in the copies of the others.
            for service, stub in {"scheduler": self._connection.scheduler_admin, **self._keepers()}.items():
                async for piece in self._connection.stream(stub.Backup, pb.BackupRequest()):
                    await copy.add(piece)
                    yield BackedUp(service, piece.path, copy.files, copy.bytes)
            await copy.finish()
        finally:
            await copy.discard()

    def _keepers(self) -> dict[str, Any]:
        """The services that store what jobs make."""
        return {"metrics": self._connection.metrics_admin, "artifacts": self._connection.artifacts_admin}
