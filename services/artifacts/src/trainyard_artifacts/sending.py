"""Chunks that go out: read from packs a little ahead of what was sent, verified, small ones together in a message."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from servicekit.errors import DataLoss, NotFound
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts.chunks import Chunk, ChunkLost, Chunks, Run, runs
from trainyard_artifacts.counters import Counters
from trainyard_artifacts.files import Piece
from trainyard_artifacts.tables import VersionRow

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 3  # reads under way for one call
_MESSAGE_BYTES = 1024 * 1024
_BLOCK = 10_000  # chunks whose places are looked up at once


class Sender:
    """Sends chunks of versions."""

    def __init__(self, chunks: Chunks, counters: Counters) -> None:
        self._chunks = chunks
        self._counters = counters

    async def send(
        self, row: VersionRow, paths: Mapping[bytes, str], hashes: Sequence[bytes]
    ) -> AsyncIterator[pb.Chunk]:
        """Messages with the chunks of a version, in the order asked for.

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
        async for found in self._read(row, paths, hashes):
            for message in _messages(found):
                yield message

    async def send_file(self, row: VersionRow, path: str, pieces: Sequence[Piece]) -> AsyncIterator[bytes]:
        """The bytes of these pieces of a file, one after the other.

        Raises:
            DataLoss: a stored chunk is damaged or gone, naming file and version.
        """
        hashes = [piece.hash for piece in pieces]
        wanted = iter(pieces)
        async for found in self._read(row, dict.fromkeys(hashes, path), hashes):
            for (_, data), piece in zip(found, wanted, strict=False):
                yield data[piece.start : piece.end]

    async def _read(
        self, row: VersionRow, paths: Mapping[bytes, str], hashes: Sequence[bytes]
    ) -> AsyncIterator[list[Chunk]]:
        """The chunks of a version in portions of a few MiB, each verified, in the order asked for.

        Raises:
            DataLoss: a stored chunk is damaged or gone, naming file and version.
        """
        try:
            for start in range(0, len(hashes), _BLOCK):
                block = hashes[start : start + _BLOCK]
                places = await self._chunks.places(row.workspace, block)

                async def read(run: Run) -> list[Chunk]:
                    return await self._chunks.read(row.workspace, run)

                async for found in ahead(runs(block, places), read, _AHEAD):
                    self._counters.bytes_sent.inc(sum(len(data) for _, data in found))
                    yield found
        except ChunkLost as error:
            self._counters.chunks_damaged.inc()
            raise _lost(row, paths[error.hash], error) from error


def _messages(chunks: Sequence[Chunk]) -> Iterator[pb.Chunk]:
    """Small chunks travel together: a message of its own costs as much as the bytes of a whole large chunk."""
    message: pb.Chunk | None = None
    size = 0
    for hash, data in chunks:
        if message is not None and size + len(data) <= _MESSAGE_BYTES:
            message.more.add(hash=hash, data=data)
            size += len(data)
            continue
        if message is not None:
            yield message
        message, size = pb.Chunk(hash=hash, data=data), len(data)
    if message is not None:
        yield message


async def ahead(items: Iterable[T], work: Callable[[T], Awaitable[R]], depth: int) -> AsyncIterator[R]:
    """`work(item)` of every item, in order, with up to `depth` of them under way."""
    under_way: deque[asyncio.Future[R]] = deque()
    try:
        for item in items:
            under_way.append(asyncio.ensure_future(work(item)))
            if len(under_way) >= depth:
                yield await under_way.popleft()
        while under_way:
            yield await under_way.popleft()
    finally:
        for left in under_way:
            left.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


def _lost(row: VersionRow, path: str, error: ChunkLost) -> DataLoss:
    state = "gone" if error.gone else "damaged"
    return DataLoss(
        f"'{path}' of version {row.number} of '{row.name}' cannot be read: a stored chunk is {state}",
        reason="ChunkDamaged",
        hint="use another version; storing the same file again heals this one",
        fields={"file": path, "version": row.id, "chunk": error.hash.hex()},
    )
