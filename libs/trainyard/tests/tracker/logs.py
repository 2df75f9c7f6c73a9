"""Reading what a tracker wrote, for tests."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trainyard.tracker.reading import LogReader, Stretch


class Row(NamedTuple):
    number: int
    names: tuple[str, ...]
    step: int
    time_ns: int
    values: tuple[float, ...]


def rows_of(stretch: Stretch) -> list[Row]:
    """The rows in the order in which they were written, taken from the columns."""
    rows = []
    for group in stretch.groups:
        columns = [_unpack("d", group.column(index)) for index in range(len(group.names))]
        steps, times = _unpack("q", group.steps()), _unpack("q", group.times_ns())
        for place, number in enumerate(group.numbers):
            values = tuple(column[place] for column in columns)
            rows.append(Row(stretch.first_row + number, group.names, steps[place], times[place], values))
    return sorted(rows)


def _unpack(kind: str, column: bytes) -> tuple:
    return struct.unpack(f"<{len(column) // 8}{kind}", column)


def stretches(reader: LogReader, limit_bytes: int = 4096) -> Iterator[Stretch]:
    while (stretch := reader.read(limit_bytes)) is not None:
        yield stretch


def writers(folder: Path) -> list[str]:
    """Ids of the writers with a log in a folder."""
    return sorted({path.name.partition(".")[0] for path in folder.iterdir()})


def readers(folder: Path) -> list[LogReader]:
    """Of every log in a folder, from its start."""
    return [LogReader(folder, writer) for writer in writers(folder)]


def rows(folder: Path) -> list[Row]:
    """Of all logs."""
    return [row for reader in readers(folder) for stretch in stretches(reader) for row in rows_of(stretch)]


def points(folder: Path) -> list[tuple[str, int, float]]:
    """Name, step and value of everything that was logged."""
    return [(name, row.step, value) for row in rows(folder) for name, value in zip(row.names, row.values, strict=True)]
