"""Reading a pack to see whether it is what was written."""

from __future__ import annotations

from dataclasses import dataclass, field

from servicekit.store import Store
from sqlmodel import Session, select

from trainyard_artifacts import index
from trainyard_artifacts.chunks import ChunkLost, Chunks, Run, key_of, runs
from trainyard_artifacts.domain.pack import TRAILER_BYTES, BadPack, Entry, read_table, table_place
from trainyard_artifacts.domain.rewriting import Occupancy
from trainyard_artifacts.index import Place
from trainyard_artifacts.objects import ObjectMissing, ObjectStore
from trainyard_artifacts.tables import ChunkRow


@dataclass(slots=True)
class Inspected:
    """What is wrong with a pack; nothing, when nothing is set."""

    gone: bool = False
    bad_table: str = ""
    lost: set[bytes] = field(default_factory=set)
    """Chunks that cannot be read from it."""
    sound_again: set[bytes] = field(default_factory=set)
    """Chunks that count as damaged, but are not."""


async def table_of(objects: ObjectStore, key: str) -> list[Entry]:
    """What a pack says is in it.

    Raises:
        BadPack: its table is damaged. ObjectMissing: it is gone.
    """
    size = await objects.size(key)
    if size < TRAILER_BYTES:
        raise BadPack("the pack is shorter than a trailer")
    trailer = await objects.get(key, size - TRAILER_BYTES, TRAILER_BYTES)
    offset, length = table_place(size, trailer)
    return read_table(await objects.get(key, offset, length), trailer)


async def inspect(store: Store, objects: ObjectStore, chunks: Chunks, pack: Occupancy) -> Inspected:
    """Checks the table and every living chunk of a pack. A pack that is rewritten meanwhile has nothing wrong."""
    found = Inspected()
    entries = await store.read(lambda session: index.chunks_of(session, pack.id))
    try:
        table = set(await table_of(objects, key_of(pack.workspace, pack.id)))
        if not table.issuperset(entries):
            found.bad_table = "the table does not name every chunk that the index has there"
    except BadPack as error:
        found.bad_table = str(error)
    except ObjectMissing:
        found.gone = True
    places = {entry.hash: Place(pack.id, entry.offset, entry.size) for entry in entries}
    for run in runs(list(places), places):
        found.lost |= await _unreadable(chunks, pack, run)
    still_there, marked = await store.read(lambda session: _states(session, pack))
    found.lost &= still_there
    found.sound_again = (marked & places.keys()) - found.lost
    if not still_there:
        return Inspected()
    return found


async def _unreadable(chunks: Chunks, pack: Occupancy, run: Run) -> set[bytes]:
    try:
        await chunks.read_place(pack.workspace, run)
    except ChunkLost:
        if len(run.entries) == 1:
            return {run.entries[0].hash}
        alone = [await _unreadable(chunks, pack, Run(run.pack, [entry])) for entry in run.entries]
        return set().union(*alone)
    return set()


def _states(session: Session, pack: Occupancy) -> tuple[set[bytes], set[bytes]]:
    """Chunks that lie there now, and those of them that count as damaged."""
    rows = session.exec(select(ChunkRow.hash, ChunkRow.damaged).where(ChunkRow.pack == pack.id)).all()
    return {hash for hash, _ in rows}, {hash for hash, damaged in rows if damaged}
