"""Reading everything there is, and mending what can be mended.

First the database itself. Every pack is read: its table, each chunk that the index has there. Then every manifest: its
digest, and whether the index has its chunks. At last the counts of what holds each chunk. With repair, a chunk that is
lost in one pack is looked for in all others, packs that the index does not know included; what is found nowhere counts
as missing from then on, so that sending the same file again heals it.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass

from servicekit.errors import DataLoss
from servicekit.events import AdminEvent, Recorder
from servicekit.ids import now_ns
from servicekit.store import Store
from servicekit.verify import acknowledge_loss, database_findings, is_gone
from sqlmodel import Session
from trainyard.artifacts import manifest
from trainyard_protos.v1 import admin_pb2 as pb

from trainyard_artifacts import catalog, holders, index
from trainyard_artifacts.chunks import PACKS, ChunkLost, Chunks, Run
from trainyard_artifacts.collector import SERVICE, Collector
from trainyard_artifacts.domain.names import is_id
from trainyard_artifacts.domain.pack import BadPack, Entry
from trainyard_artifacts.domain.rewriting import Occupancy
from trainyard_artifacts.index import Place
from trainyard_artifacts.inspection import Inspected, inspect, table_of
from trainyard_artifacts.objects import ObjectMissing, ObjectStore
from trainyard_artifacts.tables import PackRow, VersionRow

Finding = pb.VerifyResponse.Finding


@dataclass(frozen=True, slots=True)
class Verifier:
    """Verifies one artifact store."""

    store: Store
    objects: ObjectStore
    chunks: Chunks
    collector: Collector

    async def run(self, repair: Recorder | None) -> AsyncIterator[pb.VerifyResponse]:
        """Progress, and what was found.

        Args:
            repair: records what is repaired; None: nothing is.
        """
        acknowledge = None if repair is None else functools.partial(acknowledge_loss, self.store, repair, SERVICE)
        for finding in await database_findings(self.store, acknowledge=acknowledge):
            yield pb.VerifyResponse(finding=finding)
        if is_gone(self.store):
            return
        packs = await self.store.read(index.occupancies)
        versions = await self.store.read(holders.living_ids)
        checked, total = 0, len(packs) + len(versions)
        for pack in packs:
            found = await inspect(self.store, self.objects, self.chunks, pack)
            checked += 1
            yield pb.VerifyResponse(checked=checked, total=total)
            async for finding in self._pack_findings(pack, found, repair):
                yield pb.VerifyResponse(checked=checked, total=total, finding=finding)
        for version in versions:
            checked += 1
            yield pb.VerifyResponse(checked=checked, total=total)
            async for finding in self._version_findings(version, repair):
                yield pb.VerifyResponse(checked=checked, total=total, finding=finding)
        async for finding in self._count_findings(repair):
            yield pb.VerifyResponse(checked=checked, total=total, finding=finding)

    async def _pack_findings(
        self, pack: Occupancy, found: Inspected, repair: Recorder | None
    ) -> AsyncIterator[Finding]:
        called = f"pack {pack.id} of workspace '{pack.workspace}'"
        if found.lost:
            what = f"{called} is gone" if found.gone else f"{called}: {len(found.lost):,} of its chunks cannot be read"
            yield await self._lost(what, pack.workspace, found.lost, pack.id, repair)
        if found.bad_table and not found.lost:
            what = f"{called}: {found.bad_table}"
            rewritten = await self.collector.rewrite([pack], _recording(repair, what)) if repair else 0
            yield Finding(
                what=what,
                hint="" if rewritten else "repair writes its chunks, which are sound, into a new pack",
                repaired=bool(rewritten),
            )
        if found.sound_again:
            what = f"{called}: {len(found.sound_again):,} of its chunks count as damaged and are not"
            if repair:
                record, sound = _recording(repair, what), found.sound_again

                def change(session: Session) -> None:
                    index.mark_sound(session, pack.workspace, sound, pack.id)
                    record(session)

                await self.store.write(change)
            yield Finding(
                what=what,
                hint="" if repair else "repair lets them count as sound",
                repaired=repair is not None,
            )

    async def _version_findings(self, id: str, repair: Recorder | None) -> AsyncIterator[Finding]:
        row, damaged, missing = await self.store.read(lambda session: _examine(session, id))
        if row is None:
            return
        if damaged:
            yield Finding(
                what=f"the manifest of {holders.name_of(row)} is damaged",
                hint="delete the version, and store its files again",
                lost=f"every file of {holders.name_of(row)}",
            )
        if missing:
            what = f"the index does not know {len(missing):,} of the chunks of {holders.name_of(row)}"
            yield await self._lost(what, row.workspace, missing, "", repair)

    async def _lost(
        self, what: str, workspace: str, lost: Collection[bytes], pack: str, repair: Recorder | None
    ) -> Finding:
        """A finding about chunks that cannot be read where they should lie."""
        left = set(lost)
        if repair:
            async with self.collector.holding:  # no pack with a copy goes before the copy counts
                copies = await self._find_copies(workspace, left, pack)
                left -= copies.keys()
                found = f"{what} -> {len(copies):,} found in other packs, {len(left):,} lost"
                record = _recording(repair, found)

                def change(session: Session) -> None:
                    for hash, (row, place) in copies.items():
                        index.heal(session, workspace, hash, place, row, now_ns())
                    marked = [index.mark_damaged(session, workspace, hash, pack) for hash in left]
                    if copies or any(marked):
                        record(session)

                await self.store.write(change)
        files = str(await self.store.read(lambda session: holders.files_with(session, workspace, left)))
        if not left:
            return Finding(what=what, repaired=True)
        hint = "store these files again: that heals every version with them" if repair else "repair looks for copies"
        return Finding(what=what, hint=hint, lost=files)

    async def _find_copies(self, workspace: str, wanted: set[bytes], not_in: str) -> dict[bytes, tuple[PackRow, Place]]:
        """Where else these chunks lie and can be read."""
        found: dict[bytes, tuple[PackRow, Place]] = {}
        for key, size in await self.objects.list(f"{PACKS}{workspace}/"):
            id = key.rpartition("/")[2]
            if id == not_in or not is_id(id) or found.keys() == wanted:
                continue
            try:
                table = await table_of(self.objects, key)
            except (BadPack, ObjectMissing):
                continue
            row = PackRow(id=id, workspace=workspace, size=size, data_bytes=sum(entry.size for entry in table))
            for entry in table:
                if entry.hash in wanted - found.keys() and await self._readable(row, entry):
                    found[entry.hash] = row, Place(row.id, entry.offset, entry.size)
        return found

    async def _readable(self, pack: PackRow, entry: Entry) -> bool:
        try:
            await self.chunks.read_place(pack.workspace, Run(pack.id, [entry]))
        except ChunkLost:
            return False
        return True

    async def _count_findings(self, repair: Recorder | None) -> AsyncIterator[Finding]:
        try:
            wrong = await self.store.read(_miscounted)
            if wrong:  # counted again where nothing changes meanwhile
                wrong = await self.store.write(lambda session: _miscounted(session, repair))
        except DataLoss as error:
            yield Finding(
                what=f"what holds each chunk cannot be counted: {error.message}",
                hint="delete that version, then verify again",
            )
            return
        for workspace, count in wrong.items():
            yield Finding(
                what=_in_words(workspace, count),
                hint="" if repair else "repair counts again",
                repaired=repair is not None,
            )


def _recording(repair: Recorder, what: str) -> Callable[[Session], None]:
    """Writes the event of a repair, in the transaction that makes it."""
    return functools.partial(repair.record, type=AdminEvent.REPAIRED, about=SERVICE, message=what)


def _examine(session: Session, id: str) -> tuple[VersionRow | None, bool, set[bytes]]:
    """A version, unless it was deleted; whether its manifest is damaged; its chunks that the index does not have."""
    row = session.get(VersionRow, id)
    if row is None or row.deleted_ns is not None:
        return None, False, set()
    try:
        hashes = manifest.hashes(catalog.read_manifest(session, row))
    except DataLoss:
        return row, True, set()
    return row, False, hashes - index.places(session, row.workspace, hashes).keys()


def _miscounted(session: Session, repair: Recorder | None = None) -> dict[str, int]:
    held = holders.count(session)
    found = {}
    for workspace in index.workspaces(session):
        wrong = index.miscounted(session, workspace, held[workspace])
        if wrong:
            found[workspace] = len(wrong)
        for hash in wrong if repair else ():
            index.set_count(session, workspace, hash, held[workspace][hash])
        if wrong and repair:
            _recording(repair, _in_words(workspace, len(wrong)))(session)
    return found


def _in_words(workspace: str, count: int) -> str:
    return f"{count:,} of the chunks of workspace '{workspace}' count wrong how many versions hold them"
