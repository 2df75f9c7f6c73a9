"""Sending a tree: describe it, ask which chunks are missing, send those, commit.

Chunks persist as they arrive, so an upload that was cut goes on where it stopped: call it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard.artifacts import chunking, manifest
from trainyard.artifacts.errors import FileChanged, UnsafePath
from trainyard.artifacts.parallel import each
from trainyard.artifacts.paths import check_path
from trainyard.artifacts.walk import every_file

if TYPE_CHECKING:
    from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceAsyncStub

CALL_TIMEOUT_S = 60.0
PUT_TIMEOUT_S = 300.0
_PUT_BYTES = 16 * 1024 * 1024  # one PutChunks call: what an interrupted upload sends again at most, per stream
_PUT_CHUNKS = 256
_PUT_STREAMS = 2
_HASHES_PER_CALL = 10_000
_THREADS = 4


@dataclass(frozen=True, slots=True)
class _Piece:
    """A chunk and where its bytes are."""

    hash: bytes
    file: Path
    offset: int
    size: int


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
    labels: Mapping[str, str] | None = None,
    inputs: Iterable[str] = (),
) -> pb.Version:
    """Stores files below `root` as a new version of artifact `name`.

    Args:
        paths: files and links to store, below `root` (relative to it, or absolute); None for all of them.
        kind: "code", "checkpoint", "output" or "data".
        aliases: names that move to the new version, beside "latest".
        idempotency_key: the same key gives the same version.

    Raises:
        UnsafePath, BadManifest, FileChanged: see `trainyard.artifacts.errors`.
        grpc.aio.AioRpcError: the store refused it, or cannot be reached.
    """
    request = pb.CommitRequest(
        workspace=workspace,
        name=name,
        kind=kind,
        aliases=aliases,
        idempotency_key=idempotency_key,
        producer=producer,
        checkpoint=checkpoint,
        labels=labels or {},
        inputs=inputs,
    )
    await _store(stub, root, paths, request)
    return await stub.Commit(request, timeout=CALL_TIMEOUT_S)


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
) -> pb.Version | None:
    """Stores one node's files of a version that `parts` nodes make together under the same `idempotency_key`.

    Returns:
        The version once all parts are there, else None.

    Raises:
        as `upload`.
    """
    request = pb.CommitRequest(
        workspace=workspace,
        name=name,
        kind=kind,
        idempotency_key=idempotency_key,
        producer=producer,
        checkpoint=checkpoint,
    )
    await _store(stub, root, paths, request)
    response = await stub.CommitPart(
        pb.CommitPartRequest(commit=request, part=part, parts=parts), timeout=CALL_TIMEOUT_S
    )
    return response.version if response.HasField("version") else None


async def _store(
    stub: ArtifactServiceAsyncStub, root: Path, paths: Iterable[Path] | None, request: pb.CommitRequest
) -> None:
    tree = await describe(root, paths)
    await send(stub, request.workspace, root, tree)
    request.manifest.CopyFrom(tree)


async def describe(root: Path, paths: Iterable[Path] | None = None) -> pb.Manifest:
    """The manifest of files below `root`, hashed in threads.

    Raises:
        UnsafePath: a path is not below `root`, or is not one a tree may hold.
        FileChanged: a file changed while it was read.
    """
    loop = asyncio.get_running_loop()
    chosen = await asyncio.to_thread(every_file, root) if paths is None else list(paths)
    names = [_relative(root, path) for path in chosen]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hash") as pool:
        files = await loop.run_in_executor(
            None, lambda: list(pool.map(lambda name: chunking.describe(root, name), names))
        )
    return manifest.make(files)


async def send(stub: ArtifactServiceAsyncStub, workspace: str, root: Path, tree: pb.Manifest) -> int:
    """Sends the chunks of `tree` that the workspace lacks; returns how many bytes that were.

    Raises:
        FileChanged: a file is no longer what the manifest says.
        grpc.aio.AioRpcError: the store refused them, or cannot be reached.
    """
    places = {
        chunk.hash: _Piece(chunk.hash, root / file.path, offset, chunk.size)
        for file, offset, chunk in manifest.chunks(tree)
    }
    missing = [places[found] async for found in _missing(stub, workspace, list(places))]
    await each(_portions(missing), lambda pieces: _put(stub, workspace, pieces), limit=_PUT_STREAMS)
    return sum(piece.size for piece in missing)


async def _missing(stub: ArtifactServiceAsyncStub, workspace: str, hashes: list[bytes]) -> AsyncIterator[bytes]:
    remaining = iter(hashes)
    while portion := list(islice(remaining, _HASHES_PER_CALL)):
        request = pb.FindMissingRequest(workspace=workspace, hashes=portion)
        for found in (await stub.FindMissing(request, timeout=CALL_TIMEOUT_S)).hashes:
            yield found


def _portions(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    portion: list[_Piece] = []
    size = 0
    for piece in pieces:
        if portion and (size + piece.size > _PUT_BYTES or len(portion) == _PUT_CHUNKS):
            yield portion
            portion, size = [], 0
        portion.append(piece)
        size += piece.size
    if portion:
        yield portion


async def _put(stub: ArtifactServiceAsyncStub, workspace: str, pieces: list[_Piece]) -> None:
    failures: list[Exception] = []

    async def messages() -> AsyncIterator[pb.Chunk]:
        # gRPC turns an exception in here into a bare cancellation, so it is kept and raised below.
        for index, piece in enumerate(pieces):
            try:
                data = await asyncio.to_thread(_read, piece)
            except (FileChanged, OSError) as error:
                failures.append(error)
                return
            yield pb.Chunk(hash=piece.hash, data=data, workspace="" if index else workspace)

    await stub.PutChunks(messages(), timeout=PUT_TIMEOUT_S)
    if failures:
        raise failures[0]


def _read(piece: _Piece) -> bytes:
    from blake3 import blake3

    with piece.file.open("rb") as file:
        file.seek(piece.offset)
        data = file.read(piece.size)
    if blake3(data).digest() != piece.hash:
        raise FileChanged(
            f"{piece.file} changed while it was sent", hint="write to a temporary name and rename it when complete"
        )
    return data


def _relative(root: Path, path: Path) -> str:
    relative = path
    if path.is_absolute():
        try:
            relative = path.relative_to(root.absolute())
        except ValueError:
            raise UnsafePath(f"{path} is not below {root}", hint="name files of the tree only") from None
    check_path(relative.as_posix())
    return relative.as_posix()
