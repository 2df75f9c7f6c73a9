"""Stored lines of output, attempt after attempt, in the order of time, in answers of bounded size."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard_protos.v1 import metrics_pb2 as pb

from trainyard_metrics.domain.lines import LineFilter
from trainyard_metrics.storage.snapshot import Snapshot


def tail(sources: list[tuple[int, Snapshot]], wanted: LineFilter, count: int) -> list[pb.StoredLine]:
    """The last `count` lines of (attempt, source) pairs, in order."""
    found: list[pb.StoredLine] = []
    for attempt, source in reversed(sources):
        for line in source.lines(wanted, backwards=True):
            found.append(pb.StoredLine(attempt=attempt, line=line))
            if len(found) == count:
                return found[::-1]
    return found[::-1]


def every(sources: list[tuple[int, Snapshot]], wanted: LineFilter) -> Iterator[pb.StoredLine]:
    """All lines of (attempt, source) pairs, in order."""
    for attempt, source in sources:
        for line in source.lines(wanted):
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
