"""Chunks in and out."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from blake3 import blake3
from servicekit.errors import DataLoss, InvalidArgument, NotFound
from trainyard.artifacts import manifest
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts.access import workspace_of
from trainyard_artifacts.blobs import BlobStore, ChunkDamaged, ChunkMissing
from trainyard_artifacts.counters import Counters
from trainyard_artifacts.settings import Settings
from trainyard_artifacts.tables import VersionRow

_REMEMBERED_TREES = 8


async def receive(
    chunks: AsyncIterator[pb.Chunk], blobs: BlobStore, settings: Settings, counters: Counters
) -> pb.PutChunksResponse:
    """Keeps a stream of chunks, each checked against its hash; they are durable when this returns.

    Raises:
        InvalidArgument: HashMismatch, BadChunk; chunks before the bad one are kept.
    """
    total = pb.PutChunksResponse()
    batch: list[tuple[bytes, bytes]] = []
    size = 0
    workspace: str | None = None

    async def keep(workspace: str) -> None:
        nonlocal size
        stored = await blobs.put(workspace, batch)
        total.stored += stored
        total.bytes += size
        counters.chunks_stored.inc(stored)
        counters.bytes_received.inc(size)
        batch.clear()
        size = 0

    async for chunk in chunks:
        if workspace is None:
            workspace = workspace_of(chunk.workspace)
        await asyncio.to_thread(_check, chunk)
        batch.append((chunk.hash, chunk.data))
        size += len(chunk.data)
        if size >= settings.put_batch_bytes:
            await keep(workspace)
    if workspace is not None and batch:
        await keep(workspace)
    return total


def _check(chunk: pb.Chunk) -> None:
    if len(chunk.hash) != manifest.HASH_BYTES or not 0 < len(chunk.data) <= manifest.MAX_CHUNK_BYTES:
        raise InvalidArgument(
            f"a chunk of {len(chunk.data)} bytes with a hash of {len(chunk.hash)} bytes",
            reason="BadChunk",
            hint=f"chunks hold 1 to {manifest.MAX_CHUNK_BYTES} bytes and are named by {manifest.HASH_BYTES} bytes",
        )
    if blake3(chunk.data).digest() != chunk.hash:
        raise InvalidArgument(
            f"the bytes sent as chunk {chunk.hash.hex()} have another hash",
            reason="HashMismatch",
            hint="the file changed while it was sent, or the bytes were damaged on the way: send it again",
        )


@dataclass
class Trees:
    """Which file of a version holds which chunk; of the versions read last."""

    _known: OrderedDict[str, dict[bytes, str]] = field(default_factory=OrderedDict)

    def get(self, version_id: str) -> dict[bytes, str] | None:
        """Path by chunk, when this version was read recently."""
        return self._known.get(version_id)

    def put(self, version_id: str, tree: pb.Manifest) -> dict[bytes, str]:
        """Remembers a version's manifest."""
        paths = {chunk.hash: file.path for file, _, chunk in manifest.chunks(tree)}
        self._known[version_id] = paths
        if len(self._known) > _REMEMBERED_TREES:
            self._known.popitem(last=False)
        return paths


async def send(
    row: VersionRow, paths: dict[bytes, str], hashes: list[bytes], blobs: BlobStore, counters: Counters
) -> AsyncIterator[pb.Chunk]:
    """Verified chunks of a version, in the order asked for.

    Raises:
        NotFound: a chunk does not belong to the version.
        DataLoss: a stored chunk is damaged or gone, naming file and version.
    """
    for hash in hashes:
        if hash not in paths:
            raise NotFound(
                f"chunk {hash.hex()} does not belong to version {row.id}",
                reason="ChunkNotFound",
                hint="ask for chunks of the version's manifest",
            )
    for hash in hashes:
        try:
            data = await blobs.get(row.workspace, hash)
        except (ChunkDamaged, ChunkMissing) as error:
            counters.chunks_damaged.inc()
            raise _lost(row, paths[hash], hash, isinstance(error, ChunkMissing)) from error
        counters.bytes_sent.inc(len(data))
        yield pb.Chunk(hash=hash, data=data)


def _lost(row: VersionRow, path: str, hash: bytes, gone: bool) -> DataLoss:
    state = "gone" if gone else "damaged"
    return DataLoss(
        f"'{path}' of version {row.number} of '{row.name}' cannot be read: a stored chunk is {state}",
        reason="ChunkDamaged",
        hint="use another version; storing the same file again heals this one",
        fields={"file": path, "version": row.id, "chunk": hash.hex()},
    )
