"""Removes what nothing needs any more: expired versions, unused chunks, empty packs.

Safe while uploads run and wherever it is cut off. A chunk goes in a transaction that finds it unused and untouched
for the grace time, so that a commit or a renewal before it wins. A pack's object goes after the transaction that
forgets the pack; if that does not come to pass, the object is one that the index does not know, and the next sweep
finds it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from servicekit.clock import CLOCK
from servicekit.events import AdminEvent, Recorder, Subject
from servicekit.store import Store
from servicekit.verify import knows_everything
from sqlmodel import Session, col, select

from trainyard_artifacts import index, retention
from trainyard_artifacts.chunks import PACKS, ChunkLost, Chunks, age_s, key_of, runs
from trainyard_artifacts.commits import drop_part
from trainyard_artifacts.counters import Counters
from trainyard_artifacts.domain import pack, rewriting
from trainyard_artifacts.domain.names import is_id
from trainyard_artifacts.domain.rewriting import Occupancy
from trainyard_artifacts.folder import UNFINISHED
from trainyard_artifacts.index import Place
from trainyard_artifacts.objects import ObjectStore
from trainyard_artifacts.settings import Settings
from trainyard_artifacts.tables import PackRow, PartRow

logger = logging.getLogger(__name__)

SERVICE = Subject("Service", "artifacts")
_ROWS_AT_ONCE = 5000
_SOONER_AT_START = 12


@dataclass
class Collected:
    """What one collection did."""

    versions: int = 0
    parts: int = 0
    chunks: int = 0
    packs: int = 0
    rewritten: int = 0
    orphans: int = 0
    freed_bytes: int = 0

    def words(self) -> list[str]:
        """What was done, in words; nothing for what there was nothing of."""
        said = {
            "versions expired": self.versions,
            "waiting parts dropped": self.parts,
            "unused chunks removed": self.chunks,
            "packs rewritten": self.rewritten,
            "empty packs removed": self.packs,
            "unfinished packs removed": self.orphans,
        }
        return [f"{what}: {count:,}" for what, count in said.items() if count]


@dataclass
class Collector:
    """Collects at intervals until it is cancelled. Whoever holds `holding` keeps packs where they are."""

    store: Store
    objects: ObjectStore
    chunks: Chunks
    settings: Settings
    counters: Counters
    holding: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> None:
        """Collects for ever, first soon after the start: a yard may be up for short times only.

        A collection that failed is logged, and tried again at the next interval.
        """
        pause_s = self.settings.collect_interval_s / _SOONER_AT_START
        while True:
            await asyncio.sleep(pause_s)
            pause_s = self.settings.collect_interval_s
            try:
                await self.collect()
            except Exception:
                self.counters.collections_failed.inc()
                logger.exception("collection of unused chunks failed")

    async def collect(self, recorder: Recorder | None = None) -> Collected:
        """One collection: retention, then parts, chunks, packs.

        Args:
            recorder: of the user who asked for it; None when it is done by itself.
        """
        async with self.holding:
            done = Collected()
            done.versions = await self._retain(recorder)
            done.parts = await self._drop_parts()
            done.chunks = await self._remove_chunks()
            done.rewritten = await self._rewrite_hollow()
            await self._remove_packs(done)
            await self._remove_orphans(done)
        self.counters.versions_expired.inc(done.versions)
        self.counters.chunks_collected.inc(done.chunks)
        self.counters.bytes_freed.inc(done.freed_bytes)
        if recorder is not None and (words := done.words()):
            message = f"{done.freed_bytes:,} bytes freed; {'; '.join(words)}"
            maintained = functools.partial(recorder.record, type=AdminEvent.MAINTAINED, about=SERVICE, message=message)
            await self.store.write(maintained)
        return done

    async def _retain(self, recorder: Recorder | None) -> int:
        defaults = self.settings.retention
        removed = 0
        for workspace, name in await self.store.read(lambda session: retention.ruled(session, defaults)):
            apply = functools.partial(
                retention.apply, workspace=workspace, name=name, defaults=defaults, recorder=recorder
            )
            removed += await self.store.write(apply)
        return removed

    async def _drop_parts(self) -> int:
        before_ns = CLOCK.past_ns() - int(self.settings.part_ttl_s * 1e9)
        return await self.store.write(lambda session: _drop_parts(session, before_ns))

    async def _remove_chunks(self) -> int:
        before_ns = CLOCK.past_ns() - int(self.settings.chunk_grace_s * 1e9)
        removed = 0
        while count := await self.store.write(lambda session: index.remove_unused(session, before_ns, _ROWS_AT_ONCE)):
            removed += count
        return removed

    async def rewrite(self, packs: Sequence[Occupancy], also: Callable[[Session], None]) -> int:
        """Writes what lives in these packs into new ones; returns how many could be read whole and were rewritten.

        Args:
            also: what is done in the transaction that takes the new pack into the index.
        """
        async with self.holding:
            return await self._rewrite_group(packs, also)

    async def _rewrite_hollow(self) -> int:
        packs = await self.store.read(index.occupancies)
        rewritten = 0
        for group in rewriting.groups(packs, self.settings.rewrite_below, self.settings.put_batch_bytes):
            rewritten += await self._rewrite_group(group)
        return rewritten

    async def _rewrite_group(self, group: Sequence[Occupancy], also: Callable[[Session], None] | None = None) -> int:
        moved: list[tuple[str, bytes]] = []
        copies: dict[bytes, bytes] = {}
        for old in group:
            try:
                found = await self._living(old)
            except ChunkLost:
                logger.warning("a pack with damaged chunks is not rewritten", extra={"pack": old.id})
                continue
            copies |= found
            moved += [(old.id, hash) for hash in found]
        if not moved:
            return 0
        built = pack.build(copies.items())
        where = {entry.hash: entry for entry in built.entries}
        await self.chunks.add_pack(group[0].workspace, built, [(old, where[hash]) for old, hash in moved], also)
        return len({old for old, _ in moved})

    async def _living(self, old: Occupancy) -> dict[bytes, bytes]:
        entries = await self.store.read(lambda session: index.chunks_of(session, old.id))
        places = {entry.hash: Place(old.id, entry.offset, entry.size) for entry in entries}
        found: dict[bytes, bytes] = {}
        for run in runs(list(places), places):
            found |= dict(await self.chunks.read_place(old.workspace, run))
        return found

    async def _remove_packs(self, done: Collected) -> None:
        sizes = {pack.id: pack.size for pack in await self.store.read(index.occupancies)}
        for workspace, id in await self.store.write(index.remove_empty_packs):
            await self.objects.delete(key_of(workspace, id))
            done.packs += 1
            done.freed_bytes += sizes.get(id, 0)

    async def _remove_orphans(self, done: Collected) -> None:
        if not await knows_everything(self.store):
            logger.warning("packs that the index does not know are kept: its database was missing, see admin verify")
            return
        found = await self.objects.list(PACKS)
        # What is old and unknown now, and not being stored, stays unknown: the index takes no old packs in.
        storing = self.chunks.storing
        known = set(await self.store.read(lambda session: session.exec(select(PackRow.id)).all()))
        for key, size in found:
            id = key.rpartition("/")[2].removesuffix(UNFINISHED)
            if id in storing:
                continue
            if is_id(id) and (id not in known or key.endswith(UNFINISHED)) and age_s(id) > self.settings.orphan_grace_s:
                await self.objects.delete(key)
                done.orphans += 1
                done.freed_bytes += size


def _drop_parts(session: Session, before_ns: int) -> int:
    rows = session.exec(select(PartRow).where(col(PartRow.created_ns) < before_ns)).all()
    for row in rows:
        session.expunge(row)
        drop_part(session, row)
    return len(rows)
