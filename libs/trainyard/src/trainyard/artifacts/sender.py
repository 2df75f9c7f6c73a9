"""Sending what is read, while more is read: ask which chunks are missing, send those, go on.

A thread fills pages (see `scan`); for every page the loop asks which of its chunks the workspace lacks and sends them
in one call, some pages at a time. Chunks persist as calls return, so an upload that was cut goes on where it stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard.artifacts.calls import CALL_TIMEOUT_S, MOVE_TIMEOUT_S, Pace, Progress, patiently
from trainyard.artifacts.pages import Closed, Page, Pages, Piece
from trainyard.artifacts.scan import scan

if TYPE_CHECKING:
    from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceAsyncStub

_MESSAGE_BYTES = 1024 * 1024  # chunks travel together up to this: a message costs as much as half of that


async def send_files(
    stub: ArtifactServiceAsyncStub, workspace: str, root: Path, names: Sequence[str], pace: Pace, progress: Progress
) -> tuple[list[pb.File], int]:
    """Reads files below `root` and sends the chunks that the workspace lacks.

    Returns:
        The manifest entries, in the order of `names`, and how many bytes had to be sent.

    Raises:
        UnsafePath, FileChanged, OSError: see `scan`.
        grpc.aio.AioRpcError: the store refused them, or stayed away.
    """
    sender = _Sender(stub, workspace, pace, progress)
    files = await read_pages(root, names, pace, sender.deliver)
    return files, sender.sent_bytes


async def read_pages(
    root: Path, names: Sequence[str], pace: Pace, deliver: Callable[[Page], Awaitable[None]]
) -> list[pb.File]:
    """Reads files on a thread and delivers their pages, several at a time; returns their manifest entries."""
    pages = Pages(pace.pages, pace.page_bytes)

    async def take(page: Page) -> None:
        await deliver(page)
        pages.give_back(page)

    try:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(asyncio.to_thread(_read, root, names, pages))
            async for page in pages.filled():
                group.create_task(take(page))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        pages.close()
    return reading.result()


def _read(root: Path, names: Sequence[str], pages: Pages) -> list[pb.File]:
    try:
        return scan(root, names, pages)
    except Closed:
        return []  # whoever wanted it has failed


class _Sender:
    """Brings pages to the store."""

    def __init__(self, stub: ArtifactServiceAsyncStub, workspace: str, pace: Pace, progress: Progress) -> None:
        self._stub = stub
        self._workspace = workspace
        self._pace = pace
        self._progress = progress
        self._line = asyncio.Semaphore(pace.streams)
        self._known: set[bytes] = set()  # asked for already, by this page or an earlier one
        self.sent_bytes = 0

    async def deliver(self, page: Page) -> None:
        """Returns when every chunk of the page is stored."""
        fresh = {piece.hash: piece for piece in page.pieces if piece.hash not in self._known}
        self._known.update(fresh)
        missing = [fresh[hash] for hash in await self._missing(list(fresh))]
        if missing:
            async with self._line:
                await patiently(lambda: self._put(page, missing), self._pace.patience_s)
        self.sent_bytes += sum(piece.size for piece in missing)
        self._progress(sum(piece.size for piece in page.pieces))

    async def _missing(self, hashes: list[bytes]) -> Sequence[bytes]:
        if not hashes:
            return []
        request = pb.FindMissingRequest(workspace=self._workspace, hashes=hashes)
        call = self._stub.FindMissing
        return (await patiently(lambda: call(request, timeout=CALL_TIMEOUT_S), self._pace.patience_s)).hashes

    async def _put(self, page: Page, pieces: list[Piece]) -> None:
        await self._stub.PutChunks(self._messages(page, pieces), timeout=MOVE_TIMEOUT_S)

    async def _messages(self, page: Page, pieces: list[Piece]) -> AsyncIterator[pb.Chunk]:
        workspace = self._workspace
        for first, *more in _together(pieces):
            message = pb.Chunk(hash=first.hash, data=page.bytes_of(first), workspace=workspace)
            for piece in more:  # in place: chunks given to the constructor would be encoded, decoded and copied
                message.more.add(hash=piece.hash, data=page.bytes_of(piece))
            yield message
            workspace = ""


def _together(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Pieces message by message; a message has one at least."""
    message: list[Piece] = []
    size = 0
    for piece in pieces:
        if message and size + piece.size > _MESSAGE_BYTES:
            yield message
            message, size = [], 0
        message.append(piece)
        size += piece.size
    if message:
        yield message
