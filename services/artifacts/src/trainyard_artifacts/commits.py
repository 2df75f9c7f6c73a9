"""Commits: check everything, then make the version in one transaction."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass

from servicekit.errors import FailedPrecondition, InvalidArgument
from servicekit.ids import now_ns
from servicekit.store import Store
from sqlmodel import Session, col, delete, select
from trainyard.artifacts import ArtifactError, manifest
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts import catalog, fences
from trainyard_artifacts.blobs import BlobStore
from trainyard_artifacts.domain import names, parts
from trainyard_artifacts.settings import Settings
from trainyard_artifacts.tables import PartRow, VersionRow

_MAX_KEY = 1024  # attempt, artifact and path, as agents make it
_MAX_LABEL = 256


@dataclass(frozen=True, slots=True)
class Commits:
    """Makes versions."""

    store: Store
    blobs: BlobStore
    settings: Settings

    async def commit(self, request: pb.CommitRequest) -> pb.Version:
        """Makes a version of a whole tree. `request` names its workspace and its producer.

        Raises:
            InvalidArgument: BadName, BadKind, BadManifest, UnsafePath, ...
            FailedPrecondition: ChunkMissing, StaleFence, KindMismatch.
            AlreadyExists: IdempotencyKeyReused.
        """
        await self._check(request)
        return await self.store.write(functools.partial(_commit, request=request))

    async def commit_part(self, request: pb.CommitPartRequest) -> pb.Version | None:
        """Keeps one part; makes the version when it was the last one missing.

        Raises:
            as `commit`; FailedPrecondition: PartsConflict.
        """
        if not 0 < request.parts <= self.settings.max_parts or not 0 <= request.part < request.parts:
            raise InvalidArgument(
                f"part {request.part} of {request.parts}",
                reason="BadPart",
                hint=f"parts are numbered from 0, and there are at most {self.settings.max_parts}",
            )
        if not request.commit.idempotency_key:
            raise InvalidArgument(
                "a part without an idempotency key", reason="BadPart", hint="give all parts of a version the same key"
            )
        await self._check(request.commit)
        return await self.store.write(functools.partial(_commit_part, request=request))

    async def _check(self, request: pb.CommitRequest) -> None:
        self._check_fields(request)
        try:
            await asyncio.to_thread(manifest.check, request.manifest)
        except ArtifactError as error:
            raise InvalidArgument(error.message, reason=error.reason, hint=error.hint) from error
        # Asking also renews them: none of these chunks is swept before the transaction below is over.
        missing = await self.blobs.missing(request.workspace, manifest.hashes(request.manifest))
        if missing:
            raise FailedPrecondition(
                f"{len(missing)} chunks are not in workspace '{request.workspace}': {_holder(request, missing[0])}",
                reason="ChunkMissing",
                hint="send what FindMissing names, then commit again",
                fields={"missing": str(len(missing))},
            )

    def _check_fields(self, request: pb.CommitRequest) -> None:
        names.check_name(request.name)
        names.check_kind(request.kind)
        for alias in request.aliases:
            names.check_alias(alias)
        if request.HasField("checkpoint") != (request.kind == "checkpoint"):
            raise InvalidArgument(
                f"kind '{request.kind}' and the checkpoint's facts do not belong together",
                reason="BadCheckpoint",
                hint="versions of kind 'checkpoint', and only they, have a step and a cut",
            )
        if request.checkpoint.best_metric and request.checkpoint.best_mode not in ("min", "max"):
            raise InvalidArgument(
                f"best_mode '{request.checkpoint.best_mode}'", reason="BadCheckpoint", hint="use 'min' or 'max'"
            )
        bounds = {
            "bytes of checkpoint facts": (request.checkpoint.ByteSize(), self.settings.max_checkpoint_bytes),
            "labels": (len(request.labels), self.settings.max_labels),
            "inputs": (len(request.inputs), self.settings.max_inputs),
            "characters of idempotency key": (len(request.idempotency_key), _MAX_KEY),
            "characters in a label": (max((len(k) + len(v) for k, v in request.labels.items()), default=0), _MAX_LABEL),
        }
        for what, (value, limit) in bounds.items():
            if value > limit:
                raise InvalidArgument(f"{value} {what}", reason="TooLarge", hint=f"at most {limit} are allowed")


def _holder(request: pb.CommitRequest, hash: bytes) -> str:
    return next(
        f"'{file.path}' needs {hash.hex()}"
        for file, _, chunk in manifest.chunks(request.manifest)
        if chunk.hash == hash
    )


def _commit(session: Session, request: pb.CommitRequest) -> pb.Version:
    encoded = manifest.encode(request.manifest)
    digest = manifest.digest(encoded)
    row = catalog.committed(session, request.workspace, request.idempotency_key, digest)
    if row is None:
        _check_fence(session, request)
        _check_inputs(session, request)
        row = catalog.add(session, request, encoded, digest)
    return catalog.messages(session, [row])[0]


def _check_fence(session: Session, request: pb.CommitRequest) -> None:
    if request.producer.fence:
        fences.check(session, request.workspace, request.producer.job_id, request.producer.fence)


def _check_inputs(session: Session, request: pb.CommitRequest) -> None:
    query = select(VersionRow.id).where(
        VersionRow.workspace == request.workspace, col(VersionRow.id).in_(list(request.inputs))
    )
    unknown = set(request.inputs) - set(session.exec(query).all())
    if unknown:
        raise FailedPrecondition(
            f"input '{min(unknown)}' is not a version of workspace '{request.workspace}'",
            reason="InputNotFound",
            hint="name inputs by version id",
        )


def _commit_part(session: Session, request: pb.CommitPartRequest) -> pb.Version | None:
    commit = request.commit
    done = catalog.committed(session, commit.workspace, commit.idempotency_key, b"")
    if done is not None:
        return catalog.messages(session, [done])[0]
    _check_fence(session, commit)
    found = _keep_part(session, request)
    if len(found) < request.parts:
        return None
    whole = parts.join([pb.CommitRequest.FromString(row.request) for row in found])
    version = _commit(session, whole)
    session.exec(
        delete(PartRow).where(col(PartRow.workspace) == commit.workspace, col(PartRow.key) == commit.idempotency_key)
    )
    return version


def _keep_part(session: Session, request: pb.CommitPartRequest) -> list[PartRow]:
    commit = request.commit
    session.merge(
        PartRow(
            workspace=commit.workspace,
            key=commit.idempotency_key,
            part=request.part,
            parts=request.parts,
            request=commit.SerializeToString(),
            created_ns=now_ns(),
        )
    )
    session.flush()
    query = (
        select(PartRow)
        .where(PartRow.workspace == commit.workspace, PartRow.key == commit.idempotency_key)
        .order_by(col(PartRow.part))
    )
    found = list(session.exec(query).all())
    if any(row.parts != request.parts for row in found):
        raise FailedPrecondition(
            f"parts of '{commit.name}' disagree about how many there are",
            reason="PartsConflict",
            hint="give every version an idempotency key of its own",
        )
    return found
