"""Chunks by workspace and hash: bytes in packs, places in the index.

A chunk is there once its pack is durable and its row committed, in this order; whoever fails in between leaves an
object that the index does not know, which the collector finds. Reading looks a place up again when the pack is gone:
it was rewritten meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from blake3 import blake3
from servicekit.clock import CLOCK
from servicekit.errors import Aborted, InvalidArgument
from servicekit.ids import new_id, now_ns
from servicekit.store import Store
from sqlmodel import Session

from trainyard_artifacts import index
from trainyard_artifacts.domain import pack
from trainyard_artifacts.domain.pack import Entry
from trainyard_artifacts.index import Place
from trainyard_artifacts.objects import ObjectMissing, ObjectStore
from trainyard_artifacts.settings import Settings
from trainyard_artifacts.tables import PackRow

PACKS = "packs/"
RUN_BYTES = 4 * 1024 * 1024  # one read from a pack
_RENEW_BEFORE = 4  # a chunk is renewed once this part of its grace time is over

Chunk = tuple[bytes, bytes]  # hash, data


class ChunkLost(Exception):
    """A chunk cannot be read: it is damaged, or gone."""

    def __init__(self, hash: bytes, gone: bool) -> None:
        super().__init__(hash.hex())
        self.hash = hash
        self.gone = gone


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks that lie one after the other in one pack."""

    pack: str
    entries: list[Entry]

    @property
    def size(self) -> int:
        """Bytes of them all."""
        return self.entries[-1].offset + self.entries[-1].size - self.entries[0].offset


def key_of(workspace: str, id: str) -> str:
    """Key of a pack's object."""
    return f"{PACKS}{workspace}/{id}"


def age_s(id: str) -> float:
    """Seconds since an id (a UUIDv7) was made, at least: a step of the wall clock makes none older."""
    return CLOCK.past_ns() / 1e9 - int(id[:8] + id[9:13], 16) / 1e3


def runs(hashes: Sequence[bytes], places: Mapping[bytes, Place]) -> Iterator[Run]:
    """The chunks in this order, as few reads as possible, none above `RUN_BYTES` unless it is of one chunk."""
    run: Run | None = None
    start = end = 0
    for hash in hashes:
        place = places[hash]
        follows = run is not None and (run.pack, end) == (place.pack, place.offset)
        if run is None or not follows or place.offset + place.size - start > RUN_BYTES:
            if run is not None:
                yield run
            run, start = Run(place.pack, []), place.offset
        run.entries.append(Entry(hash, place.offset, place.size))
        end = place.offset + place.size
    if run is not None:
        yield run


class Chunks:
    """Stores and reads chunks."""

    def __init__(self, store: Store, objects: ObjectStore, settings: Settings) -> None:
        self._store = store
        self._objects = objects
        self._settings = settings
        self._storing: set[str] = set()

    @property
    def storing(self) -> frozenset[str]:
        """Ids of packs whose objects are being stored: the index will know them soon."""
        return frozenset(self._storing)

    async def missing(self, workspace: str, hashes: Collection[bytes]) -> list[bytes]:
        """Those of `hashes` that are not there. The others stay for most of the grace time at least."""
        now = now_ns()
        states = await self._store.read(lambda session: index.sound(session, workspace, hashes))
        renew_before = now - int(self._settings.chunk_grace_s * 1e9 / _RENEW_BEFORE)
        # What a manifest holds begins its grace time when it is given up, so it needs no renewal.
        old = [hash for hash, state in states.items() if not state.used and state.touched_ns < renew_before]
        there = set(states)
        if old:
            kept = await self._store.write(lambda session: index.renew(session, workspace, old, now))
            there -= set(old) - kept
        return [hash for hash in hashes if hash not in there]

    async def put(self, workspace: str, chunks: Sequence[Chunk]) -> int:
        """Keeps chunks durably, as one pack; returns how many were new.

        Raises:
            InvalidArgument: HashMismatch: nothing of it is kept.
            ResourceExhausted, Unavailable: there is no space, or the store fails.
        """
        await asyncio.to_thread(_check, chunks)
        given = dict(chunks)
        new = {hash: given[hash] for hash in await self.missing(workspace, given)}
        if new:
            built = pack.build(new.items())
            await self.add_pack(workspace, built)
        return len(new)

    async def add_pack(
        self,
        workspace: str,
        built: pack.Pack,
        moved: Sequence[tuple[str, Entry]] | None = None,
        also: Callable[[Session], None] | None = None,
    ) -> None:
        """Stores a pack, then takes it into the index: as new chunks, or as copies of `moved` (old pack, place).

        Args:
            also: what is done in the same transaction of the index.
        """
        id = new_id()
        self._storing.add(id)
        try:
            await self._store_pack(id, workspace, built, moved, also)
        finally:
            self._storing.discard(id)

    async def _store_pack(
        self,
        id: str,
        workspace: str,
        built: pack.Pack,
        moved: Sequence[tuple[str, Entry]] | None,
        also: Callable[[Session], None] | None,
    ) -> None:
        begun_ns = CLOCK.steady_ns()
        await self._objects.put(key_of(workspace, id), built.parts)

        def admit(session: Session) -> None:
            if CLOCK.steady_ns() - begun_ns > self._settings.orphan_grace_s / 2 * 1e9:
                # A sweep may soon take it for one that nobody finished.
                raise Aborted("storing took too long", reason="PackTooOld", hint="try again; the store is slow")
            row = PackRow(id=id, workspace=workspace, size=built.size, data_bytes=built.data_bytes)
            if moved is None:
                index.add_pack(session, row, built.entries, now_ns())
            else:
                index.move(session, row, moved)
            if also is not None:
                also(session)

        await self._store.write(admit)

    async def places(self, workspace: str, hashes: Collection[bytes]) -> dict[bytes, Place]:
        """Where chunks lie.

        Raises:
            ChunkLost: the index does not know one.
        """
        found = await self._store.read(lambda session: index.places(session, workspace, hashes))
        for hash in hashes:
            if hash not in found:
                raise ChunkLost(hash, gone=True)
        return found

    async def read(self, workspace: str, run: Run) -> list[Chunk]:
        """The verified chunks of a run.

        Raises:
            ChunkLost: one is damaged or gone; from now on it counts as missing.
        """
        try:
            return await self.read_place(workspace, run)
        except ChunkLost:
            return [await self._read_again(workspace, entry.hash) for entry in run.entries]

    async def _read_again(self, workspace: str, hash: bytes) -> Chunk:
        place: Place | None = None
        while True:
            known, place = place, (await self.places(workspace, [hash]))[hash]
            try:
                return (await self.read_place(workspace, Run(place.pack, [Entry(hash, place.offset, place.size)])))[0]
            except ChunkLost:
                if place == known and self._store.read_only:
                    raise
                if place == known:
                    mark = partial(index.mark_damaged, workspace=workspace, hash=hash, pack=place.pack)
                    await self._store.write(mark)
                    raise

    async def read_place(self, workspace: str, run: Run) -> list[Chunk]:
        """The verified chunks at a place.

        Raises:
            ChunkLost: one is damaged, or the pack is gone.
        """
        start = run.entries[0].offset
        try:
            data = await self._objects.get(key_of(workspace, run.pack), start, run.size)
        except ObjectMissing:
            raise ChunkLost(run.entries[0].hash, gone=True) from None
        return await asyncio.to_thread(_verified, data, run)


def _check(chunks: Sequence[Chunk]) -> None:
    for hash, data in chunks:
        if blake3(data).digest() != hash:
            raise InvalidArgument(
                f"the bytes sent as chunk {hash.hex()} have another hash",
                reason="HashMismatch",
                hint="the file changed while it was sent, or the bytes were damaged on the way: send it again",
            )


def _verified(data: bytes, run: Run) -> list[Chunk]:
    start = run.entries[0].offset
    view = memoryview(data)
    chunks = []
    for entry in run.entries:
        piece = view[entry.offset - start : entry.offset - start + entry.size]
        if blake3(piece).digest() != entry.hash:
            raise ChunkLost(entry.hash, gone=False)
        chunks.append((entry.hash, data if len(piece) == len(data) else bytes(piece)))
    return chunks
