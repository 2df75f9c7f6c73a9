"""The format of a pack: many chunks in one immutable object, with a table of what is where at its end.

    header   8 bytes   b"TYPACK1\\n"
    chunks             one after the other, as they are
    table              an entry for each chunk, in the order of the chunks: its BLAKE3 hash (32 bytes), its offset from
                       the beginning of the pack (u64) and its size (u32)
    trailer  24 bytes  offset of the table (u64), entries (u32), CRC-32 of the table (u32), b"TYPACKE\\n"

Numbers are little-endian. A pack tells all about itself: the database's index can be made again from packs alone.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

HEADER = b"TYPACK1\n"
_END = b"TYPACKE\n"
_ENTRY = struct.Struct("<32sQI")
_TRAILER = struct.Struct("<QII8s")
TRAILER_BYTES = _TRAILER.size


class BadPack(Exception):
    """These bytes are not those of a whole pack."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A chunk and where it lies in its pack, in bytes."""

    hash: bytes
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack to be written: `parts` one after the other are its bytes."""

    parts: list[bytes]
    entries: list[Entry]
    size: int

    @property
    def data_bytes(self) -> int:
        """Bytes of its chunks."""
        return sum(entry.size for entry in self.entries)


def build(chunks: Iterable[tuple[bytes, bytes]]) -> Pack:
    """A pack of (hash, data) pairs, without copying the data."""
    parts, entries, offset = [HEADER], [], len(HEADER)
    for hash, data in chunks:
        parts.append(data)
        entries.append(Entry(hash, offset, len(data)))
        offset += len(data)
    table = b"".join(_ENTRY.pack(entry.hash, entry.offset, entry.size) for entry in entries)
    trailer = _TRAILER.pack(offset, len(entries), zlib.crc32(table), _END)
    return Pack([*parts, table, trailer], entries, offset + len(table) + len(trailer))


def table_place(size: int, trailer: bytes) -> tuple[int, int]:
    """Where the table of a pack of `size` bytes lies: (offset, size), from the last `TRAILER_BYTES` of the pack.

    Raises:
        BadPack: the trailer is damaged, or the pack is not whole.
    """
    offset, count, _, end = _trailer(trailer)
    length = count * _ENTRY.size
    if end != _END or offset < len(HEADER) or offset + length + TRAILER_BYTES != size:
        raise BadPack("the trailer is damaged, or the pack is not whole")
    return offset, length


def read_table(table: bytes, trailer: bytes) -> list[Entry]:
    """The entries of a table that `table_place` found.

    Raises:
        BadPack: the table is damaged.
    """
    offset, _, crc, _ = _trailer(trailer)
    if zlib.crc32(table) != crc:
        raise BadPack("the table is damaged")
    entries = [Entry(*fields) for fields in _ENTRY.iter_unpack(table)]
    if any(entry.offset < len(HEADER) or entry.offset + entry.size > offset for entry in entries):
        raise BadPack("the table names places outside of the pack")
    return entries


def _trailer(trailer: bytes) -> tuple[int, int, int, bytes]:
    if len(trailer) != TRAILER_BYTES:
        raise BadPack("the pack is shorter than a trailer")
    offset, count, crc, end = _TRAILER.unpack(trailer)
    return offset, count, crc, end
