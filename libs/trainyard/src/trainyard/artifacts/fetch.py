"""Filling a draft: what is on this machine is taken from there, the rest is fetched, everything is verified."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard.artifacts import manifest
from trainyard.artifacts.calls import CALL_TIMEOUT_S, FULL, MOVE_TIMEOUT_S, Pace, Progress, ignore, patiently
from trainyard.artifacts.draft import Draft, Writer
from trainyard.artifacts.errors import Damaged, NoRoom
from trainyard.artifacts.local import Places, Supply, Wanted, places_left, places_of
from trainyard.artifacts.parallel import each

if TYPE_CHECKING:
    from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceAsyncStub

_WRITE_BYTES = 4 * 1024 * 1024  # handed to a thread at once
_CALL_BYTES = 64 * 1024 * 1024
_CALL_HASHES = 4096
_ZEROS = bytes(4096)


@dataclass(frozen=True, slots=True)
class Source:
    """A version, and how to get its bytes."""

    stub: ArtifactServiceAsyncStub
    version: pb.Version
    pace: Pace = FULL
    progress: Progress = ignore


async def find(
    stub: ArtifactServiceAsyncStub, workspace: str, reference: str, pace: Pace, progress: Progress
) -> tuple[Source, pb.Manifest]:
    """A version and its manifest, which is verified.

    Raises:
        Damaged: the manifest is not what was stored.
        UnsafePath, BadManifest: the manifest would write outside of a tree.
        grpc.aio.AioRpcError: there is no such version, or the yard stays away.
    """
    request = pb.GetVersionRequest(workspace=workspace, reference=reference)
    detail = await patiently(lambda: stub.GetVersion(request, timeout=CALL_TIMEOUT_S), pace.patience_s)
    await asyncio.to_thread(_verify, detail)
    return Source(stub, detail.version, pace, progress), detail.manifest


def _verify(detail: pb.VersionDetail) -> None:
    manifest.check(detail.manifest)
    if manifest.digest(manifest.encode(detail.manifest)) != detail.version.digest:
        raise Damaged(
            f"the manifest of version {detail.version.id} does not match its digest", hint="the store's copy is damaged"
        )


async def fill(source: Source, tree: pb.Manifest, draft: Draft, supply: Supply | None = None) -> None:
    """Makes the files of `tree`, which are of the source's version, in the draft.

    Args:
        supply: where chunks may be had without fetching them.

    Raises:
        NoRoom: the disk is too small.
        Damaged: bytes that came back are not those that were stored; the draft is gone.
        grpc.aio.AioRpcError: the store refused (DATA_LOSS: the draft is gone), or stays away.
    """
    wanted = await asyncio.to_thread(_prepare, source, tree, draft, supply)
    try:
        await each(_portions(wanted), lambda portion: _fetch(source, portion, draft), limit=source.pace.streams)
    except (Damaged, grpc.aio.AioRpcError) as error:
        if isinstance(error, Damaged) or error.code() is grpc.StatusCode.DATA_LOSS:
            await asyncio.to_thread(draft.discard)
        raise
    await asyncio.to_thread(draft.complete, tree)


def _prepare(source: Source, tree: pb.Manifest, draft: Draft, supply: Supply | None) -> Places:
    """Makes the draft, with what is on this machine; returns what is not."""
    resumed = draft.prepare(tree, source.version.digest)
    wanted = places_left(draft.tree, tree.files) if resumed else places_of(tree.files)
    _check_room(draft, wanted)
    source.progress(manifest.total_size(tree) - sum(each.size * len(each.places) for each in wanted.values()))
    return wanted if supply is None else _take(source, wanted, draft, supply)


def _check_room(draft: Draft, wanted: Places) -> None:
    """A manifest may name one chunk as often as it likes: how large its files get is asked before they grow."""
    needed = sum(each.size * len(each.places) for hash, each in wanted.items() if not _is_hole(hash, each))
    free = shutil.disk_usage(draft.tree).free
    if needed > free:
        raise NoRoom(
            f"{needed:,} bytes are to be fetched, and the disk of {draft.tree.parent} has {free:,} free",
            hint="make room, or fetch single files; nothing was changed",
        )


def _is_hole(hash: bytes, chunk: Wanted) -> bool:
    """Whether a chunk that is wanted in several places is zeros, which take no room."""
    from blake3 import blake3

    return len(chunk.places) > 1 and hash == blake3(bytes(chunk.size)).digest()


def _take(source: Source, wanted: Places, draft: Draft, supply: Supply) -> Places:
    left: Places = {}
    with draft.writer() as writer:
        for hash, chunk in wanted.items():
            content = supply.get(hash, chunk.size)
            if content is None:
                left[hash] = chunk
            else:
                source.progress(_write(writer, chunk, content))
    return left


def _write(writer: Writer, chunk: Wanted, content: bytes) -> int:
    """Puts a chunk into its places; how many bytes that are."""
    # Files are made as one hole; what is zero stays one, so that sparse files do.
    if content[: len(_ZEROS)] != _ZEROS or content.count(0) != len(content):
        for file, offset in chunk.places:
            writer.write(file, offset, content)
    else:
        for file, _ in chunk.places:
            writer.open(file)
    return chunk.size * len(chunk.places)


async def _fetch(source: Source, portion: Places, draft: Draft) -> None:
    left = dict(portion)
    with draft.writer() as writer:
        await patiently(lambda: _get(source, left, writer), source.pace.patience_s)
    if left:
        path = next(iter(left.values())).places[0][0].path
        raise Damaged(f"the store left out bytes of {path!r}", hint="try again; if it stays, the version is damaged")


async def _get(source: Source, left: Places, writer: Writer) -> None:
    """Fetches chunks and takes them out of `left` as they are written, while the next ones come."""
    request = pb.GetChunksRequest(workspace=source.version.workspace, version_id=source.version.id, hashes=left)
    answers = source.stub.GetChunks(request, timeout=MOVE_TIMEOUT_S)
    writing: asyncio.Future[int] | None = None
    try:
        async for chunks in _batches(answers):
            if writing is not None:
                source.progress(await writing)
            writing = asyncio.ensure_future(asyncio.to_thread(_write_verified, writer, left, chunks))
        if writing is not None:
            source.progress(await writing)
    finally:
        if writing is not None:
            await asyncio.wait([writing])  # the writer is in use until then


async def _batches(answers: AsyncIterable[pb.Chunk]) -> AsyncIterator[list[pb.Chunk]]:
    batch: list[pb.Chunk] = []
    size = 0
    async for message in answers:
        for chunk in (message, *message.more):
            batch.append(chunk)
            size += len(chunk.data)
        if size >= _WRITE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_verified(writer: Writer, left: Places, chunks: list[pb.Chunk]) -> int:
    from blake3 import blake3

    done = 0
    for chunk in chunks:
        wanted = left.get(chunk.hash)
        if wanted is None:
            continue
        content = chunk.data
        if blake3(content).digest() != chunk.hash:
            path = wanted.places[0][0].path
            raise Damaged(
                f"bytes of {path!r} were damaged on the way", hint="try again; if it stays, the version is damaged"
            )
        done += _write(writer, wanted, content)
        del left[chunk.hash]
    return done


def _portions(wanted: Places) -> Iterator[Places]:
    portion: Places = {}
    size = 0
    for hash, chunk in wanted.items():
        if portion and (size + chunk.size > _CALL_BYTES or len(portion) == _CALL_HASHES):
            yield portion
            portion, size = {}, 0
        portion[hash] = chunk
        size += chunk.size
    if portion:
        yield portion
