"""Chunks that come in: collected into batches, each of which becomes one pack while the next is received.

What is held in memory is bounded over all calls: a call waits for its turn before it collects, and gRPC's flow control
makes its sender wait.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from servicekit.auth import require_workspace
from servicekit.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from trainyard.artifacts import manifest
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts.chunks import Chunk, Chunks
from trainyard_artifacts.counters import Counters
from trainyard_artifacts.settings import Settings

MAX_MESSAGE_BYTES = 8 * 1024 * 1024


@dataclass(slots=True)
class _Batch:
    chunks: list[Chunk] = field(default_factory=list)
    size: int = 0


class Receiver:
    """Receives the streams of `PutChunks`."""

    def __init__(self, chunks: Chunks, settings: Settings, counters: Counters) -> None:
        self._chunks = chunks
        self._settings = settings
        self._counters = counters
        self._turns = asyncio.Semaphore(
            max(2, settings.receive_bytes // (settings.put_batch_bytes + MAX_MESSAGE_BYTES))
        )

    async def receive(
        self, messages: AsyncIterator[pb.Chunk], check: Callable[[], Awaitable[None]]
    ) -> pb.PutChunksResponse:
        """Keeps a stream of chunks, each checked against its hash; they are durable when this returns.

        Args:
            check: raises when the caller may store no more; asked for each batch.

        Raises:
            InvalidArgument: HashMismatch, BadChunk; batches before the bad one are kept.
            DeadlineExceeded: UploadIdle. ResourceExhausted: Busy, DiskFull. Unavailable: StorageFailed.
        """
        total = pb.PutChunksResponse()
        stream = aiter(messages)
        message = await self._next(stream)
        workspace = require_workspace(message.workspace if message else "")
        writing: asyncio.Task[None] | None = None
        try:
            while message is not None:
                await self._take_turn()
                batch = _Batch()
                try:
                    message = await self._fill(batch, message, stream)
                    await check()
                    if writing is not None:
                        await writing
                except BaseException:
                    self._give_turn(batch)
                    raise
                writing = asyncio.create_task(self._keep(workspace, batch, total))
            if writing is not None:
                await writing
        finally:
            if writing is not None:  # what is complete is kept, also when the call broke
                await asyncio.shield(asyncio.gather(writing, return_exceptions=True))
        return total

    async def _next(self, stream: AsyncIterator[pb.Chunk]) -> pb.Chunk | None:
        try:
            async with asyncio.timeout(self._settings.receive_idle_s):
                return await anext(stream, None)
        except TimeoutError:
            raise DeadlineExceeded(
                f"nothing came for {self._settings.receive_idle_s:g} s",
                reason="UploadIdle",
                hint="send chunks that are ready; what was sent in whole batches is kept",
            ) from None

    async def _fill(self, batch: _Batch, message: pb.Chunk, stream: AsyncIterator[pb.Chunk]) -> pb.Chunk | None:
        """Collects messages until the batch is full; returns the first one of the next batch."""
        following: pb.Chunk | None = message
        while following is not None and batch.size < self._settings.put_batch_bytes:
            taken = _chunks(following)
            size = sum(len(data) for _, data in taken)
            batch.chunks += taken
            batch.size += size
            self._counters.bytes_receiving.inc(size)
            following = await self._next(stream)
        return following

    async def _keep(self, workspace: str, batch: _Batch, total: pb.PutChunksResponse) -> None:
        try:
            stored = await self._chunks.put(workspace, batch.chunks)
        finally:
            self._give_turn(batch)
        total.stored += stored
        total.bytes += batch.size
        self._counters.chunks_stored.inc(stored)
        self._counters.bytes_received.inc(batch.size)

    async def _take_turn(self) -> None:
        try:
            async with asyncio.timeout(self._settings.receive_wait_s):
                await self._turns.acquire()
        except TimeoutError:
            raise ResourceExhausted(
                "too many uploads at once", reason="Busy", hint="try again; what was sent in whole batches is kept"
            ) from None

    def _give_turn(self, batch: _Batch) -> None:
        self._counters.bytes_receiving.dec(batch.size)
        batch.chunks.clear()
        self._turns.release()


def _chunks(message: pb.Chunk) -> list[Chunk]:
    chunks: list[Chunk] = []
    for chunk in itertools.chain((message,), message.more):
        hash, data = chunk.hash, chunk.data
        if len(hash) != manifest.HASH_BYTES or not 0 < len(data) <= manifest.MAX_CHUNK_BYTES:
            raise InvalidArgument(
                f"a chunk of {len(data)} bytes with a hash of {len(hash)} bytes",
                reason="BadChunk",
                hint=f"chunks hold 1 to {manifest.MAX_CHUNK_BYTES} bytes and are named by {manifest.HASH_BYTES} bytes",
            )
        chunks.append((hash, data))
    if sum(len(data) for _, data in chunks) > MAX_MESSAGE_BYTES or any(chunk.more for chunk in message.more):
        raise InvalidArgument(
            "a message with too much in it",
            reason="BadChunk",
            hint=f"a message holds at most {MAX_MESSAGE_BYTES >> 20} MiB, and chunks in it hold no others",
        )
    return chunks
