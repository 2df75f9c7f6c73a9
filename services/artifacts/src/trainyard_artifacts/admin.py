"""The methods of `ArtifactAdminService`: what an operator asks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from servicekit.auth import require_user
from servicekit.backup import PIECE_BYTES, database_and_files, in_threads, recorded
from servicekit.events import AdminEvent, EventLog, Recorder, caller
from servicekit.store import Store
from trainyard_protos.v1 import admin_pb2 as pb
from trainyard_protos.v1.admin_pb2_grpc import ArtifactAdminServiceServicer

from trainyard_artifacts import index, usage
from trainyard_artifacts.chunks import Chunks, key_of
from trainyard_artifacts.collector import SERVICE, Collector
from trainyard_artifacts.objects import ObjectStore
from trainyard_artifacts.verify import Verifier

Context = grpc.aio.ServicerContext[Any, Any]


class ArtifactAdminServicer(ArtifactAdminServiceServicer):
    """For users only.

    Args:
        home: the yard's folder, where the snapshot of a backup lies until it is sent.
    """

    def __init__(
        self,
        home: Path,
        store: Store,
        objects: ObjectStore,
        chunks: Chunks,
        collector: Collector,
        events: EventLog,
    ) -> None:
        self._events = events
        self._home = home
        self._store = store
        self._objects = objects
        self._collector = collector
        self._verifier = Verifier(store, objects, chunks, collector)

    async def GetUsage(self, request: pb.GetUsageRequest, context: Context) -> pb.GetUsageResponse:
        require_user()
        found = await self._store.read(lambda session: [*usage.measure(session), self._events.usage(session)])
        return pb.GetUsageResponse(usage=found, free_bytes=await self._objects.free_bytes())

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> AsyncIterator[pb.VerifyResponse]:
        require_user()
        repair = Recorder(self._events, caller(context)) if request.repair else None
        async for message in self._verifier.run(repair):
            yield message

    async def Maintain(self, request: pb.MaintainRequest, context: Context) -> pb.MaintainResponse:
        require_user()
        done = await self._collector.collect(Recorder(self._events, caller(context)))
        return pb.MaintainResponse(freed_bytes=done.freed_bytes, done=done.words())

    async def Backup(self, request: pb.BackupRequest, context: Context) -> AsyncIterator[pb.BackupResponse]:
        require_user()
        recorder = Recorder(self._events, caller(context))

        async def record(type: AdminEvent, message: str) -> None:
            await self._store.write(lambda session: recorder.record(session, type, SERVICE, message))

        async for piece in recorded(self._store.engine, self._backup(), record):
            yield piece

    async def ListAdminEvents(self, request: pb.ListAdminEventsRequest, context: Context) -> pb.ListAdminEventsResponse:
        return await self._events.page(self._store, request)

    async def _backup(self) -> AsyncIterator[pb.BackupResponse]:
        async with self._collector.holding:  # no pack of the snapshot goes before it was sent
            async for piece in in_threads(database_and_files(self._store.engine, "artifacts.db", self._home)):
                yield piece
            for pack in await self._store.read(index.occupancies):
                async for piece in self._pieces(key_of(pack.workspace, pack.id), pack.size):
                    yield piece

    async def _pieces(self, key: str, size: int) -> AsyncIterator[pb.BackupResponse]:
        for offset in range(0, size, PIECE_BYTES):
            data = await self._objects.get(key, offset, min(PIECE_BYTES, size - offset))
            yield pb.BackupResponse(path=key, data=data)
