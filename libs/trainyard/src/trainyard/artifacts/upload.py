"""Storing a tree as a version: read, cut, hash and send at once, then commit.

An upload that was cut goes on where it stopped: call it again. What the store has is not sent again.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard.artifacts import manifest
from trainyard.artifacts.calls import CALL_TIMEOUT_S, CHUNK_MISSING, FULL, Pace, Progress, ignore, patiently, reason
from trainyard.artifacts.errors import UnsafePath
from trainyard.artifacts.pages import Page
from trainyard.artifacts.paths import check_path
from trainyard.artifacts.sender import read_pages, send_files
from trainyard.artifacts.walk import every_file

if TYPE_CHECKING:
    from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceAsyncStub

Answer = TypeVar("Answer")
Before = Callable[[], Awaitable[None]]

_COMMITS = 2  # chunks may be swept when an upload takes longer than the store's grace: then they are sent again


async def at_once() -> None:
    """Nothing has to be waited for."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A tree whose chunks are in the store.

    Attributes:
        manifest: what to commit.
        bytes: that had to be sent; the store had the others.
    """

    manifest: pb.Manifest
    bytes: int


async def upload(
    stub: ArtifactServiceAsyncStub,
    root: Path,
    paths: Iterable[Path] | None = None,
    *,
    workspace: str,
    name: str,
    kind: str,
    aliases: Iterable[str] = (),
    idempotency_key: str = "",
    producer: pb.Producer | None = None,
    checkpoint: pb.CheckpointInfo | None = None,
    before_commit: Before = at_once,
    labels: Mapping[str, str] | None = None,
    inputs: Iterable[str] = (),
    metrics: Mapping[str, float] | None = None,
    pace: Pace = FULL,
    progress: Progress = ignore,
) -> pb.Version:
    """Stores files below `root` as a new version of artifact `name`.

    Args:
        paths: files and links to store, below `root` (relative to it, or absolute); None for all of them.
        kind: "code", "checkpoint", "output" or "data".
        aliases: names that move to the new version, beside "latest".
        idempotency_key: the same key gives the same version.
        before_commit: awaited once everything is sent; the version is there only after it.
        inputs: ids of the versions that it was made from.
        metrics: what retention by the best one looks at.
        progress: told how many more bytes are stored, as they are.

    Raises:
        UnsafePath, BadManifest, FileChanged: see `trainyard.artifacts.errors`.
        OSError: a file is gone or cannot be read.
        grpc.aio.AioRpcError: the store refused it, or stayed away.
    """
    request = pb.CommitRequest(
        workspace=workspace,
        name=name,
        kind=kind,
        aliases=aliases,
        idempotency_key=idempotency_key or f"upload/{uuid.uuid4()}",  # a commit whose answer was lost is asked again
        producer=producer,
        checkpoint=checkpoint,
        labels=labels or {},
        inputs=inputs,
        metrics=metrics or {},
    )

    async def commit(tree: pb.Manifest) -> pb.Version:
        request.manifest.CopyFrom(tree)
        return await stub.Commit(request, timeout=CALL_TIMEOUT_S)

    return await _store(stub, workspace, root, paths, commit, before_commit, pace, progress)


async def upload_part(
    stub: ArtifactServiceAsyncStub,
    root: Path,
    paths: Iterable[Path] | None = None,
    *,
    part: int,
    parts: int,
    workspace: str,
    name: str,
    kind: str,
    idempotency_key: str,
    producer: pb.Producer | None = None,
    checkpoint: pb.CheckpointInfo | None = None,
    before_commit: Before = at_once,
    pace: Pace = FULL,
) -> pb.Version | None:
    """Stores one node's files of a version that `parts` nodes make together under the same `idempotency_key`.

    Returns:
        The version once all parts are there, else None.

    Raises:
        as `upload`.
    """
    request = pb.CommitPartRequest(
        commit=pb.CommitRequest(
            workspace=workspace,
            name=name,
            kind=kind,
            idempotency_key=idempotency_key,
            producer=producer,
            checkpoint=checkpoint,
        ),
        part=part,
        parts=parts,
    )

    async def commit(tree: pb.Manifest) -> pb.CommitPartResponse:
        request.commit.manifest.CopyFrom(tree)
        return await stub.CommitPart(request, timeout=CALL_TIMEOUT_S)

    response = await _store(stub, workspace, root, paths, commit, before_commit, pace, ignore)
    return response.version if response.HasField("version") else None


async def _store(
    stub: ArtifactServiceAsyncStub,
    workspace: str,
    root: Path,
    paths: Iterable[Path] | None,
    commit: Callable[[pb.Manifest], Awaitable[Answer]],
    before_commit: Before,
    pace: Pace,
    progress: Progress,
) -> Answer:
    chosen = None if paths is None else list(paths)
    left = _COMMITS
    while True:
        sent = await send(stub, workspace, root, chosen, pace=pace, progress=progress)
        left -= 1
        await before_commit()
        try:
            return await patiently(functools.partial(commit, sent.manifest), pace.patience_s)
        except grpc.aio.AioRpcError as error:
            if not left or reason(error) != CHUNK_MISSING:
                raise
            progress = ignore  # everything was counted


async def send(
    stub: ArtifactServiceAsyncStub,
    workspace: str,
    root: Path,
    paths: Iterable[Path] | None = None,
    *,
    pace: Pace = FULL,
    progress: Progress = ignore,
) -> Sent:
    """Sends the chunks of files below `root` that the workspace lacks, without making a version.

    Raises:
        as `upload`.
    """
    names = await _names(root, paths)
    files, sent_bytes = await send_files(stub, workspace, root, names, pace, progress)
    return Sent(await asyncio.to_thread(manifest.make, files), sent_bytes)


async def describe(root: Path, paths: Iterable[Path] | None = None) -> pb.Manifest:
    """The manifest of files below `root`, without sending anything.

    Raises:
        as `upload`.
    """

    async def drop(page: Page) -> None:
        del page

    files = await read_pages(root, await _names(root, paths), FULL, drop)
    return await asyncio.to_thread(manifest.make, files)


async def _names(root: Path, paths: Iterable[Path] | None) -> list[str]:
    def names() -> list[str]:
        return [_relative(root, path) for path in (every_file(root) if paths is None else paths)]

    return await asyncio.to_thread(names)


def _relative(root: Path, path: Path) -> str:
    relative = path
    if path.is_absolute():
        try:
            relative = path.relative_to(root.absolute())
        except ValueError:
            raise UnsafePath(f"{path} is not below {root}", hint="name files of the tree only") from None
    check_path(relative.as_posix())
    return relative.as_posix()
