"""The index of chunks: functions over a session, each run inside of one transaction by the caller.

Hashes go to the database in blocks, a statement for each, so that a manifest of any size costs a few statements.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import Executable, case, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import CursorResult
from sqlmodel import Session, col

from trainyard_artifacts.domain.pack import Entry
from trainyard_artifacts.domain.rewriting import Occupancy
from trainyard_artifacts.tables import ChunkRow, PackRow

_BLOCK = 5000  # hashes in one statement: SQLite takes 32,766 parameters, PostgreSQL 65,535


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk lies."""

    pack: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class State:
    """What sweeping looks at."""

    used: bool
    touched_ns: int


def blocks(hashes: Collection[bytes]) -> Iterator[list[bytes]]:
    """The hashes in portions that fit into one statement."""
    remaining = iter(hashes)
    while block := list(islice(remaining, _BLOCK)):
        yield block


def _these(workspace: str, block: list[bytes]) -> tuple[Any, Any]:
    return (col(ChunkRow.workspace) == workspace, col(ChunkRow.hash).in_(block))


def sound(session: Session, workspace: str, hashes: Collection[bytes]) -> dict[bytes, State]:
    """The chunks among `hashes` that are there."""
    found: dict[bytes, State] = {}
    for block in blocks(hashes):
        query = select(col(ChunkRow.hash), col(ChunkRow.refs), col(ChunkRow.touched_ns)).where(
            *_these(workspace, block), col(ChunkRow.damaged).is_(False)
        )
        found |= {hash: State(refs > 0, touched_ns) for hash, refs, touched_ns in session.execute(query)}
    return found


def places(session: Session, workspace: str, hashes: Collection[bytes]) -> dict[bytes, Place]:
    """Where chunks lie; those that are not in the index are left out."""
    found: dict[bytes, Place] = {}
    for block in blocks(hashes):
        query = select(col(ChunkRow.hash), col(ChunkRow.pack), col(ChunkRow.offset), col(ChunkRow.size)).where(
            *_these(workspace, block)
        )
        found |= {hash: Place(*place) for hash, *place in session.execute(query)}
    return found


def renew(session: Session, workspace: str, hashes: Collection[bytes], now_ns: int) -> set[bytes]:
    """Begins the grace time of chunks anew; returns those that were still there."""
    for block in blocks(hashes):
        session.execute(update(ChunkRow).where(*_these(workspace, block)).values(touched_ns=now_ns))
    return set(sound(session, workspace, hashes))


def use(session: Session, workspace: str, hashes: Collection[bytes]) -> set[bytes]:
    """Counts one more manifest for each chunk; returns those that are not there: then the caller has to undo."""
    used = 0
    for block in blocks(hashes):
        statement = update(ChunkRow).where(*_these(workspace, block), col(ChunkRow.damaged).is_(False))
        used += _count(session, statement.values(refs=ChunkRow.refs + 1))
    return set() if used == len(hashes) else set(hashes) - sound(session, workspace, hashes).keys()


def release(session: Session, workspace: str, hashes: Collection[bytes], now_ns: int) -> None:
    """Counts one manifest less for each chunk; the grace time of those that nothing holds any more begins."""
    for block in blocks(hashes):
        statement = update(ChunkRow).where(*_these(workspace, block))
        session.execute(statement.values(refs=ChunkRow.refs - 1, touched_ns=now_ns))


def held_only(session: Session, workspace: str, held: Mapping[bytes, int]) -> int:
    """Bytes of the chunks that no more manifests hold than these.

    Args:
        held: by chunk, how many.
    """
    total = 0
    for block in blocks(held):
        query = select(col(ChunkRow.hash), col(ChunkRow.refs), col(ChunkRow.size)).where(*_these(workspace, block))
        total += sum(size for hash, refs, size in session.execute(query) if refs <= held[hash])
    return total


def mark_damaged(session: Session, workspace: str, hash: bytes, pack: str) -> bool:
    """From now on a chunk that lies there counts as missing, so that sending it again heals every version with it.

    Returns:
        Whether it did not before.
    """
    here = (*_these(workspace, [hash]), col(ChunkRow.pack) == pack, col(ChunkRow.damaged).is_(False))
    return bool(session.connection().execute(update(ChunkRow).where(*here).values(damaged=True)).rowcount)


def add_pack(session: Session, row: PackRow, entries: Sequence[Entry], now_ns: int) -> None:
    """Takes a durable pack into the index. A chunk that is known already stays where it is, unless it is damaged."""
    session.add(row)
    session.execute(
        _insertion(session.connection().dialect.name),
        [
            {
                "workspace": row.workspace,
                "hash": entry.hash,
                "pack": row.id,
                "offset": entry.offset,
                "size": entry.size,
                "refs": 0,
                "touched_ns": now_ns,
                "damaged": False,
            }
            for entry in entries
        ],
    )


@functools.cache
def _insertion(dialect: str) -> Executable:
    table = ChunkRow.__table__  # type: ignore[attr-defined]
    insert = (sqlite if dialect == "sqlite" else postgresql).insert(table)
    new = insert.excluded
    moved = {name: case((table.c.damaged, new[name]), else_=table.c[name]) for name in ("pack", "offset", "size")}
    statement: Executable = insert.on_conflict_do_update(
        index_elements=["workspace", "hash"], set_={**moved, "damaged": False, "touched_ns": new.touched_ns}
    )
    return statement


def move(session: Session, row: PackRow, moved: Sequence[tuple[str, Entry]]) -> None:
    """Takes a pack of copies into the index: what still lies in its old pack lies in the new one from now on."""
    session.add(row)
    session.flush()
    for old, entry in moved:
        session.execute(
            update(ChunkRow)
            .where(
                col(ChunkRow.workspace) == row.workspace, col(ChunkRow.hash) == entry.hash, col(ChunkRow.pack) == old
            )
            .values(pack=row.id, offset=entry.offset)
        )


def remove_unused(session: Session, before_ns: int, limit: int) -> int:
    """Removes chunks that nothing holds and nobody asked for since; at most `limit`. Returns how many."""
    unused = (col(ChunkRow.refs) == 0, col(ChunkRow.touched_ns) < before_ns)
    query = select(col(ChunkRow.workspace), col(ChunkRow.hash)).where(*unused).limit(limit)
    by_workspace: dict[str, list[bytes]] = {}
    for workspace, hash in session.execute(query):
        by_workspace.setdefault(workspace, []).append(hash)
    # The condition again: another process may have used one of them meanwhile.
    return sum(
        _count(session, delete(ChunkRow).where(*_these(workspace, block), *unused))
        for workspace, hashes in by_workspace.items()
        for block in blocks(hashes)
    )


def remove_empty_packs(session: Session) -> list[tuple[str, str]]:
    """Forgets packs without chunks; returns (workspace, id) of each. Their objects can go once this is committed."""
    living = select(col(ChunkRow.pack)).where(col(ChunkRow.pack) == col(PackRow.id)).exists()
    empty = session.execute(select(col(PackRow.workspace), col(PackRow.id)).where(~living)).all()
    for block in _ids([id for _, id in empty]):
        session.execute(delete(PackRow).where(col(PackRow.id).in_(block)))
    return [(workspace, id) for workspace, id in empty]


def _ids(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), _BLOCK):
        yield ids[start : start + _BLOCK]


def occupancies(session: Session) -> list[Occupancy]:
    """Every pack with the bytes of the chunks that lie in it, oldest first."""
    pack = (col(PackRow.workspace), col(PackRow.id), col(PackRow.size), col(PackRow.data_bytes))
    query = (
        select(*pack, func.coalesce(func.sum(ChunkRow.size), 0))
        .outerjoin(ChunkRow, col(ChunkRow.pack) == col(PackRow.id))
        .group_by(*pack)
        .order_by(col(PackRow.id))
    )
    return [
        Occupancy(workspace, id, size, data, int(living))
        for workspace, id, size, data, living in session.execute(query)
    ]


def chunks_of(session: Session, pack: str) -> list[Entry]:
    """What lies in a pack, in the order of its bytes."""
    query = select(col(ChunkRow.hash), col(ChunkRow.offset), col(ChunkRow.size)).where(col(ChunkRow.pack) == pack)
    return [Entry(*fields) for fields in session.execute(query.order_by(col(ChunkRow.offset)))]


def _count(session: Session, statement: Any) -> int:
    result = session.execute(statement)
    assert isinstance(result, CursorResult)
    return result.rowcount


def miscounted(session: Session, workspace: str, held: Mapping[bytes, int]) -> list[bytes]:
    """Chunks whose count is not that of `held`, which says how many manifests hold each chunk."""
    query = select(col(ChunkRow.hash), col(ChunkRow.refs)).where(col(ChunkRow.workspace) == workspace)
    return [hash for hash, refs in session.execute(query) if refs != held.get(hash, 0)]


def set_count(session: Session, workspace: str, hash: bytes, refs: int) -> None:
    """Says how many manifests hold a chunk."""
    session.execute(update(ChunkRow).where(*_these(workspace, [hash])).values(refs=refs))


def workspaces(session: Session) -> list[str]:
    """Those that have chunks."""
    return sorted(session.execute(select(col(ChunkRow.workspace)).distinct()).scalars())


def heal(session: Session, workspace: str, hash: bytes, place: Place, pack: PackRow, now_ns: int) -> None:
    """From now on a chunk lies at this place, where it was found sound; what holds it has to be counted again."""
    session.merge(pack)
    row = session.get(ChunkRow, (workspace, hash)) or ChunkRow(
        workspace=workspace, hash=hash, pack="", offset=0, size=0, touched_ns=now_ns
    )
    row.pack, row.offset, row.size, row.damaged = place.pack, place.offset, place.size, False
    session.add(row)


def mark_sound(session: Session, workspace: str, hashes: Collection[bytes], pack: str) -> None:
    """Chunks that lie there do not count as missing any more."""
    for block in blocks(hashes):
        here = (*_these(workspace, block), col(ChunkRow.pack) == pack)
        session.execute(update(ChunkRow).where(*here).values(damaged=False))
