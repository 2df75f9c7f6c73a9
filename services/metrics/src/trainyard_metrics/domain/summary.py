"""Summaries of series: what a list, a search or a dashboard wants to know without reading points.

A summary has one entry per series, that is per name and rank. Blocks of rows are folded in as arrays; nothing here
looks at single points. The last point of a series is the one with the highest step, then the latest time.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from trainyard_protos.v1.metrics_pb2 import Block, Rows

from trainyard_metrics.domain.columns import Columns, Indexes, Ints, Mask, arrays

ENTRY = np.dtype(
    [
        ("rank", "<i8"),
        ("count", "<u8"),
        ("last_step", "<i8"),
        ("last_time_ns", "<i8"),
        ("last_value", "<f8"),
        ("min_value", "<f8"),  # NaN when every value is
        ("max_value", "<f8"),
    ]
)
Entries = NDArray[Any]

_MAGIC = b"TYS1"
_HEADER = struct.Struct("<4sII")
_MAX_SHAPES = 512
_LAST = ("last_step", "last_time_ns", "last_value")


class BadSummary(Exception):
    """Packed bytes are not a summary."""


@dataclass(frozen=True, slots=True)
class _Shape:
    slots: Ints
    distinct: bool


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed summary, read without copying.

    Attributes:
        table: the names, each ended by a line end; equal for runs that log the same.
        entries: one per name of the table.
    """

    table: bytes
    entries: Entries

    @classmethod
    def of(cls, data: bytes) -> Packed:
        """Reads packed bytes.

        Raises:
            BadSummary
        """
        if len(data) < _HEADER.size:
            raise BadSummary(f"{len(data)} bytes are too few for a summary")
        magic, count, length = _HEADER.unpack_from(data)
        start = _HEADER.size + length
        if magic != _MAGIC or len(data) != start + count * ENTRY.itemsize:
            raise BadSummary(f"{len(data)} bytes do not hold a summary of {count} series")
        return cls(bytes(data[_HEADER.size : start]), np.frombuffer(data, ENTRY, count, start))

    def names(self) -> list[str]:
        """The name of each entry."""
        return self.table.decode().split("\n")[:-1]


@dataclass
class Summary:
    """Entries by (name, rank), in the order in which the series were met.

    Attributes:
        names: the name of each entry.
        revision: grows with every change.
    """

    names: list[str] = field(default_factory=list)
    revision: int = 0
    _entries: Entries = field(default_factory=lambda: np.zeros(16, ENTRY))
    _changed: Ints = field(default_factory=lambda: np.zeros(16, np.int64))
    _slots: dict[tuple[str, int], int] = field(default_factory=dict)
    _lead: dict[str, int] = field(default_factory=dict)
    _shapes: dict[tuple[int, tuple[str, ...]], _Shape] = field(default_factory=dict)

    @classmethod
    def unpack(cls, data: bytes) -> Summary:
        """The summary that `pack` wrote.

        Raises:
            BadSummary
        """
        packed = Packed.of(data)
        summary = cls()
        summary._fold(summary._slots_of(packed.names(), packed.entries["rank"].tolist()), packed.entries)
        return summary

    def pack(self) -> bytes:
        """The summary as bytes: header, names, entries."""
        table = "".join(f"{name}\n" for name in self.names).encode()
        return _HEADER.pack(_MAGIC, len(self.names), len(table)) + table + self.entries.tobytes()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def entries(self) -> Entries:
        """One `ENTRY` per name; a view."""
        return self._entries[: len(self.names)]

    @property
    def last_time_ns(self) -> int:
        """Of the newest point; 0 without any."""
        return int(self.entries["last_time_ns"].max(initial=0))

    def changed(self, since: int) -> Ints:
        """Indexes of entries that changed after a revision."""
        return np.flatnonzero(self._changed[: len(self.names)] > since)

    def leads(self, since: int = -1) -> Iterator[tuple[str, float]]:
        """Name and last value of the lowest rank, of every name whose entry changed after a revision."""
        for index in self.changed(since).tolist():
            name = self.names[index]
            if self._lead[name] == index:
                yield name, float(self._entries["last_value"][index])

    def add_rows(self, rows: Rows) -> None:
        """Folds in the rows of one batch."""
        for block in rows.blocks:
            shape = self._shape(rows.rank, tuple(block.names))
            part = _entries_of(block, rows.rank)
            if shape.distinct:
                self._fold(shape.slots, part)
            else:  # several names were renamed to the same
                for index in range(len(part)):
                    self._fold(shape.slots[index : index + 1], part[index : index + 1])

    def add_columns(self, columns: Columns) -> None:
        """Folds in points; those of one name, rank and writer in the order in which they were written."""
        if not len(columns):
            return
        found = list(groups(columns))
        part = np.array([_entry(columns, first, rows) for first, rows in found], ENTRY)
        names = [columns.names[columns.name[first]] for first, _ in found]
        self._fold(self._slots_of(names, part["rank"].tolist()), part)

    def merge(self, other: Summary, rows: Mask | None = None) -> None:
        """Folds in (some) entries of another summary, whose points are other ones."""
        chosen = np.arange(len(other)) if rows is None else np.flatnonzero(rows)
        part = other.entries[chosen]
        self._fold(self._slots_of([other.names[index] for index in chosen], part["rank"].tolist()), part)

    def _shape(self, rank: int, names: tuple[str, ...]) -> _Shape:
        found = self._shapes.get((rank, names))
        if found is None:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            slots = self._slots_of(names, [rank] * len(names))
            found = self._shapes[rank, names] = _Shape(slots, len(set(names)) == len(names))
        return found

    def _slots_of(self, names: Sequence[str], ranks: Sequence[int]) -> Ints:
        return np.fromiter(map(self._slot, names, ranks), np.int64, len(names))

    def _slot(self, name: str, rank: int) -> int:
        slot = self._slots.get((name, rank))
        if slot is None:
            slot = self._slots[name, rank] = len(self.names)
            self.names.append(name)
            if slot == len(self._entries):
                self._entries = np.concatenate([self._entries, np.zeros(slot, ENTRY)])
                self._changed = np.concatenate([self._changed, np.zeros(slot, np.int64)])
            entry = self._entries[slot]
            entry["rank"], entry["min_value"], entry["max_value"] = rank, np.nan, np.nan
            lead = self._lead.get(name)
            if lead is None or rank < self._entries["rank"][lead]:
                self._lead[name] = slot
        return slot

    def _fold(self, slots: Ints, part: Entries) -> None:
        held = self._entries[slots]
        newer = (held["count"] == 0) | _is_newer(part, held)
        for column in _LAST:
            held[column] = np.where(newer, part[column], held[column])
        held["count"] += part["count"]
        held["min_value"] = np.fmin(held["min_value"], part["min_value"])
        held["max_value"] = np.fmax(held["max_value"], part["max_value"])
        self._entries[slots] = held
        self.revision += 1
        self._changed[slots] = self.revision


def _is_newer(part: Entries, held: Entries) -> Mask:
    ahead: Mask = part["last_step"] > held["last_step"]
    level: Mask = part["last_step"] == held["last_step"]
    later: Mask = part["last_time_ns"] >= held["last_time_ns"]
    return ahead | (level & later)


def _entries_of(block: Block, rank: int) -> Entries:
    step, time_ns, _, value = arrays(block)
    last = _last(step, time_ns)
    part = np.empty(len(block.names), ENTRY)
    part["rank"], part["count"] = rank, len(step)
    part["last_step"], part["last_time_ns"], part["last_value"] = step[last], time_ns[last], value[:, last]
    part["min_value"], part["max_value"] = np.fmin.reduce(value, axis=1), np.fmax.reduce(value, axis=1)
    return part


def groups(columns: Columns) -> Iterator[tuple[int, Ints | slice]]:
    """Where the points of each (name, rank) are: the first of them, and all; their order stays as it is."""
    if _all_same(columns.name) and _all_same(columns.rank):
        if len(columns):
            yield 0, slice(0, len(columns))
        return
    key = (columns.name.astype(np.int64) << 32) + columns.rank
    order = None if np.all(key[1:] >= key[:-1]) else np.argsort(key, kind="stable")
    ordered = key if order is None else key[order]
    edges = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(ordered)]
    for start, end in itertools.pairwise(edges):
        if start == end:
            continue
        if order is None:
            yield start, slice(start, end)
        else:
            yield int(order[start]), order[start:end]


def _all_same(indexes: Indexes) -> bool:
    # Most of what is asked for is one series, and this is all it takes then.
    return not len(indexes) or bool((indexes == indexes[0]).all())


def _entry(columns: Columns, first: int, rows: Ints | slice) -> tuple[int, int, int, int, float, float, float]:
    step, time_ns, value = columns.step[rows], columns.time_ns[rows], columns.value[rows]
    last = _last(step, time_ns)
    low, high = np.fmin.reduce(value), np.fmax.reduce(value)
    return int(columns.rank[first]), len(value), int(step[last]), int(time_ns[last]), value[last], low, high


def _last(step: Ints, time_ns: Ints) -> int:
    highest = np.flatnonzero(step == step.max())
    times = time_ns[highest]
    return int(highest[len(times) - 1 - np.argmax(times[::-1])])
