"""Stored lines of output, in the order of time, without ever holding more than a frame of each writer.

Lines of one writer are in order already; the writers of an attempt are merged. A tail is read from the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from trainyard_protos.v1 import metrics_pb2 as pb
from trainyard_protos.v1.common_pb2 import LogLine

from trainyard_metrics.runlog import RunLog


@dataclass(frozen=True, slots=True)
class LineFilter:
    """Which lines are wanted."""

    ranks: frozenset[int]  # empty: all
    search: str
    from_time_ns: int

    def accepts(self, line: LogLine) -> bool:
        return (
            (not self.ranks or line.rank in self.ranks)
            and line.time_ns >= self.from_time_ns
            and self.search in line.text
        )


@dataclass(frozen=True, slots=True)
class LineSource:
    """The lines of one run that were durable when it was made."""

    log: RunLog
    frames: dict[str, list[int]]

    @classmethod
    def of(cls, log: RunLog) -> LineSource:
        """To be called in the event loop, which alone adds frames."""
        return cls(log, {writer: list(frames) for writer, frames in log.index.line_frames.items()})

    def read(self, wanted: LineFilter, *, backwards: bool = False) -> Iterator[LogLine]:
        """Lines by time; the newest first when `backwards`.

        Raises:
            Damaged: a frame is not what was written.
        """
        writers = [self._of_writer(writer, backwards) for writer in self.frames]
        merged = heapq.merge(*writers, key=lambda line: line.time_ns, reverse=backwards)
        return (line for line in merged if wanted.accepts(line))

    def _of_writer(self, writer: str, backwards: bool) -> Iterator[LogLine]:
        frames = self.frames[writer]
        for offset in reversed(frames) if backwards else frames:
            lines = [
                line
                for request in self.log.journal.read(offset)
                if request.writer_id == writer
                for line in request.lines.lines
            ]
            yield from reversed(lines) if backwards else lines


def tail(sources: list[tuple[int, LineSource]], wanted: LineFilter, count: int) -> list[pb.StoredLine]:
    """The last `count` lines of (attempt, source) pairs, in order."""
    found: list[pb.StoredLine] = []
    for attempt, source in reversed(sources):
        for line in source.read(wanted, backwards=True):
            found.append(pb.StoredLine(attempt=attempt, line=line))
            if len(found) == count:
                return found[::-1]
    return found[::-1]


def every(sources: list[tuple[int, LineSource]], wanted: LineFilter) -> Iterator[pb.StoredLine]:
    """All lines of (attempt, source) pairs, in order."""
    for attempt, source in sources:
        for line in source.read(wanted):
            yield pb.StoredLine(attempt=attempt, line=line)


def pages(
    lines: Iterator[pb.StoredLine], max_lines: int = 500, max_bytes: int = 1 << 20
) -> Iterator[pb.ReadLogsResponse]:
    """Lines in answers of bounded size."""
    page = pb.ReadLogsResponse()
    size = 0
    for line in lines:
        page.lines.append(line)
        size += len(line.line.text) + 64
        if len(page.lines) >= max_lines or size >= max_bytes:
            yield page
            page, size = pb.ReadLogsResponse(), 0
    if page.lines:
        yield page
