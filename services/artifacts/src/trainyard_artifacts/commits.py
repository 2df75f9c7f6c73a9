"""Commits: check everything, then make the version in one transaction."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection
from dataclasses import dataclass

from servicekit.errors import FailedPrecondition, InvalidArgument
from servicekit.events import Recorder
from servicekit.ids import now_ns
from servicekit.store import Store
from sqlmodel import Session, col, delete, select
from trainyard.artifacts import ArtifactError, manifest
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts import catalog, fences, index, retention
from trainyard_artifacts.domain import names, parts
from trainyard_artifacts.settings import Settings
from trainyard_artifacts.tables import PartRow, VersionRow

_MAX_KEY = 1024  # attempt, artifact and path, as agents make it
_MAX_LABEL = 256
_MAX_ALIASES = 64


@dataclass(frozen=True, slots=True)
class _Tree:
    """What a transaction needs of a manifest, worked out before it."""

    encoded: bytes
    digest: bytes
    size: int  # bytes of all files
    sizes: dict[bytes, int]  # by chunk


@dataclass(frozen=True, slots=True)
class Commits:
    """Makes versions."""

    store: Store
    settings: Settings

    async def commit(self, request: pb.CommitRequest, recorder: Recorder | None = None) -> pb.Version:
        """Makes a version of a whole tree. `request` names its workspace and its producer.

        Args:
            recorder: records the aliases that it moves.

        Raises:
            InvalidArgument: BadName, BadKind, BadManifest, UnsafePath, ...
            FailedPrecondition: ChunkMissing, StaleFence, KindMismatch.
            AlreadyExists: IdempotencyKeyReused.
        """
        self._check_fields(request)
        tree = await asyncio.to_thread(_read_tree, request.manifest)
        self._check_total(tree)
        await self._check_sizes(request, tree)
        return await self.store.write(functools.partial(self._commit, request=request, tree=tree, recorder=recorder))

    async def commit_part(self, request: pb.CommitPartRequest, recorder: Recorder | None = None) -> pb.Version | None:
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
        self._check_fields(request.commit)
        tree = await asyncio.to_thread(_read_tree, request.commit.manifest)
        self._check_total(tree)
        await self._check_sizes(request.commit, tree)
        commit = functools.partial(self._commit_part, request=request, tree=tree, recorder=recorder)
        return await self.store.write(commit)

    def _check_total(self, tree: _Tree) -> None:
        limit = self.settings.max_version_bytes
        if tree.size > limit:
            raise InvalidArgument(
                f"a version of {tree.size:,} bytes",
                reason="TooLarge",
                hint=f"at most {limit:,} are taken (TRAINYARD_ARTIFACTS_MAX_VERSION_BYTES); store it as several",
            )

    async def _check_sizes(self, request: pb.CommitRequest, tree: _Tree) -> None:
        """A hash has one size, so this need not be in the transaction; whether the chunks are there is asked in it."""
        places = await self.store.read(lambda session: index.places(session, request.workspace, tree.sizes))
        for hash, place in places.items():
            if place.size != tree.sizes[hash]:
                raise InvalidArgument(
                    f"{_holder(request, hash)} as {tree.sizes[hash]} bytes, which has {place.size}",
                    reason="BadManifest",
                    hint="describe the files again",
                )

    def _commit(
        self, session: Session, request: pb.CommitRequest, tree: _Tree, recorder: Recorder | None
    ) -> pb.Version:
        row = catalog.committed(session, request.workspace, request.idempotency_key, tree.digest)
        if row is None:
            _check_fence(session, request)
            _check_inputs(session, request)
            row = catalog.same_code(session, request, tree.digest)
            if row is not None:
                catalog.store_again(session, row, request, recorder)
            else:
                _use(session, request, tree.sizes)
                row = catalog.add(session, request, tree.encoded, tree.digest, recorder)
                catalog.follow_best(session, row)  # before retention: an alias keeps its version
            retention.apply(session, row.workspace, row.name, self.settings.retention)
        return catalog.messages(session, [row])[0]

    def _commit_part(
        self, session: Session, request: pb.CommitPartRequest, tree: _Tree, recorder: Recorder | None
    ) -> pb.Version | None:
        commit = request.commit
        done = catalog.committed(session, commit.workspace, commit.idempotency_key, b"")
        if done is not None:
            return catalog.messages(session, [done])[0]
        _check_fence(session, commit)
        _use(session, commit, tree.sizes)
        found = _keep_part(session, request)
        if len(found) < request.parts:
            return None
        whole = parts.join([pb.CommitRequest.FromString(row.request) for row in found])
        tree = _encode(whole.manifest)
        self._check_total(tree)
        version = self._commit(session, whole, tree, recorder)
        for row in found:
            drop_part(session, row)
        return version

    def _check_fields(self, request: pb.CommitRequest) -> None:
        names.check_name(request.name)
        names.check_kind(request.kind)
        if request.HasField("checkpoint") != (request.kind == "checkpoint"):
            raise InvalidArgument(
                f"kind '{request.kind}' and the checkpoint's facts do not belong together",
                reason="BadCheckpoint",
                hint="versions of kind 'checkpoint', and only they, have a step and a cut",
            )
        _check_rule(request.checkpoint)
        bounds = {
            "bytes of checkpoint facts": (request.checkpoint.ByteSize(), self.settings.max_checkpoint_bytes),
            "labels": (len(request.labels), self.settings.max_labels),
            "inputs": (len(request.inputs), self.settings.max_inputs),
            "aliases": (len(request.aliases), _MAX_ALIASES),
            "metrics": (len(request.metrics), self.settings.max_metrics),
            "characters of idempotency key": (len(request.idempotency_key), _MAX_KEY),
        }
        for what, (value, limit) in bounds.items():
            _check_bound(what, value, limit)
        texts = [*(k + v for k, v in request.labels.items()), *request.metrics]
        _check_bound("characters in a label or metric", max(map(len, texts), default=0), _MAX_LABEL)
        for alias in request.aliases:
            names.check_alias(alias)
            names.check_not_best(alias, request.checkpoint.best_metric)


def drop_part(session: Session, row: PartRow) -> None:
    """Forgets a part and gives its chunks up."""
    held = manifest.hashes(pb.CommitRequest.FromString(row.request).manifest)
    index.release(session, row.workspace, held, now_ns())
    session.exec(
        delete(PartRow).where(
            col(PartRow.workspace) == row.workspace, col(PartRow.key) == row.key, col(PartRow.part) == row.part
        )
    )


def _check_bound(what: str, value: int, limit: int) -> None:
    if value > limit:
        raise InvalidArgument(f"{value} {what}", reason="TooLarge", hint=f"at most {limit} are allowed")


def _check_rule(facts: pb.CheckpointInfo) -> None:
    if facts.best_mode not in (("min", "max") if facts.best_metric else ("", "min", "max")):
        raise InvalidArgument(f"best_mode '{facts.best_mode}'", reason="BadCheckpoint", hint="use 'min' or 'max'")
    if facts.keep_last < 0:
        raise InvalidArgument(f"keep_last {facts.keep_last}", reason="BadCheckpoint", hint="0 keeps all checkpoints")


def _read_tree(tree: pb.Manifest) -> _Tree:
    try:
        manifest.check(tree)
    except ArtifactError as error:
        raise InvalidArgument(error.message, reason=error.reason, hint=error.hint) from error
    return _encode(tree)


def _encode(tree: pb.Manifest) -> _Tree:
    encoded = manifest.encode(tree)
    sizes: dict[bytes, int] = {}
    for file, _, chunk in manifest.chunks(tree):
        if sizes.setdefault(chunk.hash, chunk.size) != chunk.size:
            raise InvalidArgument(
                f"'{file.path}' holds chunk {chunk.hash.hex()} with another size than before",
                reason="BadManifest",
                hint="describe the files again",
            )
    return _Tree(encoded, manifest.digest(encoded), manifest.total_size(tree), sizes)


def _use(session: Session, request: pb.CommitRequest, hashes: Collection[bytes]) -> None:
    missing = index.use(session, request.workspace, hashes)
    if missing:
        raise FailedPrecondition(
            f"{len(missing)} chunks are not in workspace '{request.workspace}': {_holder(request, min(missing))}",
            reason="ChunkMissing",
            hint="send what FindMissing names, then commit again",
            fields={"missing": str(len(missing))},
        )


def _holder(request: pb.CommitRequest, hash: bytes) -> str:
    return next(
        f"'{file.path}' needs {hash.hex()}"
        for file, _, chunk in manifest.chunks(request.manifest)
        if chunk.hash == hash
    )


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


def _keep_part(session: Session, request: pb.CommitPartRequest) -> list[PartRow]:
    commit = request.commit
    before = session.get(PartRow, (commit.workspace, commit.idempotency_key, request.part))
    if before is not None:
        drop_part(session, before)
        session.expunge(before)
    session.add(
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
