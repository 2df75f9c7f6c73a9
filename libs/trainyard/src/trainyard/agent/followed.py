"""One tracker's log, followed for shipping, for progress, and for the cuts of checkpoints."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from trainyard.agent.sources import TrackerSource
from trainyard.tracker.reading import LogReader, Stretch
from trainyard.tracker.records import segment_path

# In one look, so that nobody else has to wait for long.
STRETCHES_PER_LOOK = 4
# Files are stamped by a clock that moves once a tick of the kernel, so a file may look that much older than rows which
# were logged before it was written: 10 ms with the slowest of kernels.
FILE_CLOCK_TICK_NS = 10_000_000


@dataclass(slots=True)
class Newest:
    """How far a log is at some place.

    Attributes:
        values: the newest of every name.
        step: the highest one; None without any row.
        time_ns: when the last row was logged; 0 without any.
    """

    values: dict[str, float] = field(default_factory=dict)
    step: int | None = None
    time_ns: int = 0

    def fold(self, stretch: Stretch) -> None:
        """Goes on to the end of a stretch."""
        for group in stretch.groups:
            step, time_ns, row = group.row(-1)
            self.values.update(zip(group.names, row, strict=True))
            self.step = step if self.step is None else max(self.step, step)
            self.time_ns = max(self.time_ns, time_ns)

    def copy(self) -> Newest:
        """As it is now."""
        return replace(self, values=dict(self.values))


@dataclass(slots=True)
class _End:
    """Where a segment ends that was read.

    Attributes:
        next_row: number of the first row behind it.
        newest: how far the log is there; its values are let go where no cut can be.
    """

    index: int
    next_row: int
    newest: Newest


class FollowedLog:
    """Reads a log as it grows, and gives back its space.

    Attributes:
        source: ships its rows.
        dropped: rows that the writer had no room for.
    """

    def __init__(self, folder: Path, writer: str, index: int) -> None:
        """
        Args:
            index: of the first segment that is there.

        Raises:
            ValueError: the segment has no header yet.
        """
        self.source = TrackerSource(folder, writer, index)
        self.dropped = 0
        self._folder = folder
        self._reader = LogReader(folder, writer, index)
        self._newest = Newest()
        self._present: deque[_End] = deque()  # segments read to their end and not yet removed
        self._base = _End(index - 1, self._reader.next_row, Newest())  # no cut is before it
        self._passed = index - 1

    @property
    def writer(self) -> tuple[int, int]:
        """The writing process: its pid and start time."""
        return self._reader.header.pid, self._reader.header.start_time

    @property
    def unacknowledged(self) -> int:
        """How many of the rows that were read metrics does not have, as far as is known."""
        return max(0, self._reader.next_row - self.source.acknowledged)

    def look(self) -> list[Stretch]:
        """What is new, some of it at least."""
        found: list[Stretch] = []
        while len(found) < STRETCHES_PER_LOOK and (stretch := self._reader.read()) is not None:
            self._pass_ends()
            self._newest.fold(stretch)
            found.append(stretch)
        self._pass_ends()
        self.dropped = self._reader.dropped()
        return found

    def _pass_ends(self) -> None:
        for index in range(self._passed + 1, self._reader.index):
            first_row = self._reader.header.first_row
            self._present.append(_End(index, first_row, self._newest.copy()))
            self._passed = index

    def give_back(self, before_ns: int) -> None:
        """Removes segments that metrics has and that hold nothing younger than `before_ns`: no cut will need them."""
        old = [end for end in self._present if end.newest.time_ns < before_ns]
        for end in old:
            self._base.newest.values = {}
            self._base = end
        while old and old[0].next_row <= self.source.acknowledged:
            index = old.pop(0).index
            self._present.popleft()
            self.source.forget(index)
            segment_path(self._folder, self.source.writer_id, index).unlink(missing_ok=True)

    def cut(self, until_ns: int, step: int) -> tuple[int, Newest]:
        """Of a checkpoint of `step` whose file last changed at `until_ns`: the first row not in it, and how far the log
        is there.

        That is behind the newest row written before the change, and behind rows right after it of the same step,
        because a script may log a step just after saving it; also behind those of earlier steps within a tick, because
        they were logged before it. Rows that may have been given back are never before it.
        """
        passed = [end for end in self._present if end.index > self._base.index and end.newest.time_ns <= until_ns]
        start = passed[-1] if passed else self._base
        newest = start.newest.copy()
        reader = LogReader(self._folder, self.source.writer_id, start.index + 1)
        while True:
            before = reader.fork()
            stretch = reader.read()
            if stretch is None:
                return reader.next_row, newest
            beyond = _first_beyond(stretch, until_ns, step)
            if beyond is not None:
                break
            newest.fold(stretch)
        position = stretch.first_row + beyond
        while before.next_row < position and (part := before.read(max_rows=position - before.next_row)) is not None:
            newest.fold(part)
        return position, newest


def _first_beyond(stretch: Stretch, until_ns: int, step: int) -> int | None:
    """The first row, counted within the stretch, that was logged later and for another step."""
    found: list[int] = []
    for group in stretch.groups:
        rows = zip(group.numbers, _integers(group.times_ns()), _integers(group.steps()), strict=True)
        found += islice((number for number, time_ns, at in rows if _is_beyond(time_ns - until_ns, at - step)), 1)
    return min(found, default=None)


def _is_beyond(later_ns: int, steps_on: int) -> bool:
    return later_ns > (FILE_CLOCK_TICK_NS if steps_on < 0 else 0) and steps_on != 0


def _integers(column: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(column) // 8}q", column)
