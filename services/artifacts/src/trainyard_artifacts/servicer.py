"""The methods of `ArtifactService`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
from servicekit.auth import current_principal, require_user, require_workspace
from servicekit.errors import InvalidArgument
from servicekit.events import EventLog, Recorder, caller
from servicekit.store import Store
from sqlmodel import Session
from trainyard.artifacts import manifest
from trainyard_protos.v1 import artifacts_pb2 as pb
from trainyard_protos.v1 import metrics_pb2
from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceServicer

from trainyard_artifacts import catalog, fences, files, job_removal, lineage, listing, retention
from trainyard_artifacts.access import (
    own_key,
    producer_of,
    require_listed,
    require_no_alias,
    require_readable,
    require_writable,
)
from trainyard_artifacts.chunks import Chunks
from trainyard_artifacts.commits import Commits
from trainyard_artifacts.counters import Counters
from trainyard_artifacts.domain.names import (
    LATEST,
    ById,
    Reference,
    check_alias,
    check_name,
    check_not_best,
    parse_reference,
)
from trainyard_artifacts.receiving import Receiver
from trainyard_artifacts.sending import Sender
from trainyard_artifacts.settings import Settings
from trainyard_artifacts.tables import VersionRow
from trainyard_artifacts.trees import Trees

Context = grpc.aio.ServicerContext[Any, Any]


class ArtifactServicer(ArtifactServiceServicer):
    """Checks who calls, then hands over to catalog, commits, receiver and sender."""

    def __init__(self, store: Store, chunks: Chunks, settings: Settings, counters: Counters, events: EventLog) -> None:
        self._store = store
        self._events = events
        self._chunks = chunks
        self._settings = settings
        self._counters = counters
        self._commits = Commits(store, settings)
        self._fences = fences.Fences(store)
        self._trees = Trees(store)
        self._receiver = Receiver(chunks, settings, counters)
        self._sender = Sender(chunks, counters)

    async def _enter(self, workspace: str) -> str:
        allowed = require_workspace(workspace)
        await self._fences.observe(current_principal())
        return allowed

    async def _find(self, workspace: str, reference: Reference) -> VersionRow:
        """A version that the caller may read."""
        row = await self._store.read(lambda session: catalog.find(session, workspace, reference))
        require_readable(current_principal(), row)
        return row

    async def FindMissing(self, request: pb.FindMissingRequest, context: Context) -> pb.FindMissingResponse:
        workspace = await self._enter(request.workspace)
        hashes = self._check_hashes(list(request.hashes))
        return pb.FindMissingResponse(hashes=await self._chunks.missing(workspace, hashes))

    async def PutChunks(self, request_iterator: AsyncIterator[pb.Chunk], context: Context) -> pb.PutChunksResponse:
        admitted = partial(self._fences.observe, current_principal())  # also while the stream is open
        await admitted()
        return await self._receiver.receive(request_iterator, admitted)

    async def GetChunks(self, request: pb.GetChunksRequest, context: Context) -> AsyncIterator[pb.Chunk]:
        workspace = await self._enter(request.workspace)
        hashes = self._check_hashes(list(request.hashes))
        row = await self._find(workspace, ById(request.version_id))
        tree = await self._trees.of(row)
        async for message in self._sender.send(row, tree.paths, hashes):
            yield message

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.Version:
        await self._admit(request)
        version = await self._commits.commit(request, Recorder(self._events, caller(context)))
        self._counters.versions.labels(version.kind).inc()
        return version

    async def CommitPart(self, request: pb.CommitPartRequest, context: Context) -> pb.CommitPartResponse:
        await self._admit(request.commit)
        version = await self._commits.commit_part(request, Recorder(self._events, caller(context)))
        if version is not None:
            self._counters.versions.labels(version.kind).inc()
        return pb.CommitPartResponse(version=version)

    async def GetVersion(self, request: pb.GetVersionRequest, context: Context) -> pb.VersionDetail:
        workspace = await self._enter(request.workspace)
        reference, principal = parse_reference(request.reference), current_principal()

        def read(session: Session) -> pb.VersionDetail:
            row = catalog.find(session, workspace, reference)
            require_readable(principal, row)
            version = catalog.messages(session, [row])[0]
            tree = None if request.without_manifest else catalog.read_manifest(session, row)
            return pb.VersionDetail(version=version, manifest=tree)

        return await self._store.read(read)

    async def ListArtifacts(self, request: pb.ListArtifactsRequest, context: Context) -> pb.ListArtifactsResponse:
        workspace = await self._enter(request.workspace)
        require_listed("", request.job_id)
        return await self._store.read(lambda session: listing.artifacts(session, workspace, request))

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Context) -> pb.ListVersionsResponse:
        workspace = await self._enter(request.workspace)
        require_listed(request.name, request.job_id)
        return await self._store.read(lambda session: listing.versions(session, workspace, request))

    async def ListFiles(self, request: pb.ListFilesRequest, context: Context) -> pb.ListFilesResponse:
        workspace = await self._enter(request.workspace)
        tree = await self._trees.of(await self._find(workspace, parse_reference(request.reference)))
        return files.page(tree, request)

    async def ReadFile(self, request: pb.ReadFileRequest, context: Context) -> AsyncIterator[pb.ReadFileResponse]:
        workspace = await self._enter(request.workspace)
        row = await self._find(workspace, parse_reference(request.reference))
        file = files.find(await self._trees.of(row), request.path)
        async for data in self._sender.send_file(row, file.path, files.pieces(file, request.offset, request.length)):
            yield pb.ReadFileResponse(data=data)

    async def SetAlias(self, request: pb.SetAliasRequest, context: Context) -> pb.Version:
        workspace = await self._enter(request.workspace)
        reference = parse_reference(request.reference)
        if check_alias(request.alias) == LATEST:
            raise InvalidArgument("'latest' moves by itself", reason="BadAlias", hint="choose another alias")
        require_no_alias([request.alias])
        recorder = Recorder(self._events, caller(context))

        def change(session: Session) -> pb.Version:
            row = catalog.find(session, workspace, reference)
            check_not_best(request.alias, pb.CheckpointInfo.FromString(row.checkpoint or b"").best_metric)
            catalog.move_alias(session, row, request.alias, recorder)
            session.flush()
            return catalog.messages(session, [row])[0]

        return await self._store.write(change)

    async def DeleteVersion(self, request: pb.DeleteVersionRequest, context: Context) -> pb.DeleteVersionResponse:
        require_user()
        workspace = await self._enter(request.workspace)
        reference = parse_reference(request.reference)
        recorder = Recorder(self._events, caller(context))

        def change(session: Session) -> None:
            catalog.remove_as_asked(session, catalog.find(session, workspace, reference), recorder)

        await self._store.write(change)
        return pb.DeleteVersionResponse()

    async def DeleteJobArtifacts(
        self, request: pb.DeleteJobArtifactsRequest, context: Context
    ) -> pb.DeleteJobArtifactsResponse:
        require_user()
        workspace = await self._enter(request.workspace)
        if not request.job_id:
            raise InvalidArgument("no job id", reason="BadJobId", hint="name the job whose checkpoints are to go")
        actor = f"launcher/{request.launcher_id}" if request.launcher_id else caller(context)
        recorder = Recorder(self._events, actor)
        job = (workspace, request.job_id, list(request.kept_references))

        def answer(session: Session, removal: job_removal.Removal) -> pb.DeleteJobArtifactsResponse:
            versions = catalog.messages(session, [row for row, _ in removal.kept])
            return pb.DeleteJobArtifactsResponse(
                deleted=catalog.messages(session, removal.deleted),
                freed_bytes=removal.freed_bytes,
                kept=[
                    pb.DeleteJobArtifactsResponse.Kept(version=version, why=why)
                    for version, (_, why) in zip(versions, removal.kept, strict=True)
                ],
            )

        if request.dry_run:
            return await self._store.read(lambda session: answer(session, job_removal.plan(session, *job)))
        return await self._store.write(lambda session: answer(session, job_removal.apply(session, *job, recorder)))

    async def CloseAttempt(
        self, request: metrics_pb2.CloseAttemptRequest, context: Context
    ) -> metrics_pb2.CloseAttemptResponse:
        require_user()
        if not request.job_id or request.fence < 0:
            raise InvalidArgument(
                f"attempt {request.fence} of job '{request.job_id}'",
                reason="BadAttempt",
                hint="give the attempt's job and its fence",
            )
        attempt = (require_workspace(request.workspace), request.job_id, request.fence)
        defaults = self._settings.retention
        publish = (lambda session: retention.publish(session, *attempt, defaults)) if request.succeeded else None
        await self._fences.close(*attempt, before=publish)
        return metrics_pb2.CloseAttemptResponse()

    async def RecordUse(self, request: pb.RecordUseRequest, context: Context) -> pb.RecordUseResponse:
        workspace = await self._enter(request.workspace)
        consumer = producer_of(request.consumer)
        if not consumer.job_id:
            raise InvalidArgument("a use without a job", reason="BadConsumer", hint="say which job works with it")
        row = await self._find(workspace, ById(request.version_id))
        await self._store.write(lambda session: lineage.record(session, row, consumer))
        return pb.RecordUseResponse()

    async def GetLineage(self, request: pb.GetLineageRequest, context: Context) -> pb.Lineage:
        workspace = await self._enter(request.workspace)
        principal = current_principal()
        if request.WhichOneof("of") == "job_id":
            require_listed("", request.job_id)
            return await self._store.read(lambda session: lineage.of_job(session, workspace, request.job_id))
        wanted = parse_reference(request.reference)

        def read(session: Session) -> pb.Lineage:
            row = catalog.find(session, workspace, wanted, deleted=True)
            require_readable(principal, row)
            return lineage.of_version(session, row, principal)

        return await self._store.read(read)

    async def SetRetention(self, request: pb.SetRetentionRequest, context: Context) -> pb.Retention:
        require_user()
        workspace = await self._enter(request.workspace)
        rule = retention.check(request.retention)
        name = request.retention.name
        recorder = Recorder(self._events, caller(context))
        await self._store.write(lambda session: retention.put(session, workspace, name, rule, recorder))
        return await self._retention(workspace, name)

    async def GetRetention(self, request: pb.GetRetentionRequest, context: Context) -> pb.Retention:
        workspace = await self._enter(request.workspace)
        require_listed(check_name(request.name), "")
        return await self._retention(workspace, request.name)

    async def _retention(self, workspace: str, name: str) -> pb.Retention:
        defaults = self._settings.retention
        return retention.message(
            name, await self._store.read(lambda session: retention.get(session, workspace, name, defaults))
        )

    async def _admit(self, request: pb.CommitRequest) -> None:
        request.workspace = await self._enter(request.workspace)
        require_writable(request)
        request.idempotency_key = own_key(request.idempotency_key)
        request.producer.CopyFrom(producer_of(request.producer))
        principal = current_principal()
        if principal.kind == "attempt" and request.inputs:
            ids = list(request.inputs[: self._settings.max_inputs])
            await self._store.read(lambda session: lineage.require_inputs(session, request.workspace, ids, principal))

    def _check_hashes(self, hashes: list[bytes]) -> list[bytes]:
        limit = self._settings.max_hashes_per_call
        if len(hashes) > limit:
            raise InvalidArgument(
                f"{len(hashes):,} hashes in one call", reason="TooManyHashes", hint=f"send at most {limit:,} at a time"
            )
        if any(len(hash) != manifest.HASH_BYTES for hash in hashes):
            raise InvalidArgument(
                "a hash has the wrong length", reason="BadHash", hint=f"send the {manifest.HASH_BYTES} bytes of BLAKE3"
            )
        return hashes
