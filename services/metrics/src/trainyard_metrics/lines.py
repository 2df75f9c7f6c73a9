"""Stored lines of output, attempt after attempt, in the order of time, in answers of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from servicekit.errors import InvalidArgument
from trainyard_protos.v1 import metrics_pb2 as pb

from trainyard_metrics.domain.lines import LineFilter
from trainyard_metrics.storage.snapshot import Snapshot

_MAX_REGEX = 1024
_TAIL_BYTES = 16 * 1024 * 1024
_LINE_BYTES = 64  # what a line takes beside its text

Sources = Sequence[tuple[int, Snapshot]]
"""Attempts, oldest first, each with what is stored of it."""


def line_filter(request: pb.ReadLogsRequest) -> LineFilter:
    """Which lines a request asks for.

    Raises:
        InvalidArgument: BadRegex.
    """
    if request.regex:
        _check_regex(request.regex)
    return LineFilter(frozenset(request.ranks), request.from_time_ns, request.search, request.regex)


def _check_regex(pattern: str) -> None:
    import re2  # here, because few readers give one and it costs a shared library

    options = re2.Options()
    options.log_errors = False
    try:
        if len(pattern) > _MAX_REGEX:
            raise InvalidArgument(
                f"a pattern of {len(pattern):,} characters", reason="BadRegex", hint=f"use at most {_MAX_REGEX:,}"
            )
        re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        raise InvalidArgument(
            f"the pattern {pattern[:200]!r} is not a regular expression: {reason}",
            reason="BadRegex",
            hint="use RE2 syntax: no look-around, no back references",
        ) from None


def read(sources: Sources, wanted: LineFilter, tail: int) -> Iterator[pb.ReadLogsResponse]:
    """The lines, or (`tail` > 0) the last of them, in pages."""
    return pages(last(sources, wanted, tail) if tail else every(sources, wanted))


def every(sources: Sources, wanted: LineFilter) -> Iterator[pb.StoredLine]:
    """All lines, in order."""
    for attempt, source in sources:
        for line in source.lines(wanted):
            yield pb.StoredLine(attempt=attempt, line=line)


def last(sources: Sources, wanted: LineFilter, count: int, room: int = _TAIL_BYTES) -> Iterator[pb.StoredLine]:
    """The last `count` lines, in order. They are found from the end; what fits into `room` bytes is read only once."""
    found: list[pb.StoredLine] = []
    start = None
    for line in islice(_backwards(sources, wanted), count):
        room -= len(line.line.text) + _LINE_BYTES
        start = _Start(line.attempt, line.line.time_ns)
        if room >= 0:
            found.append(line)
    if start is None or room >= 0:
        yield from reversed(found)
        return
    found.clear()
    yield from _again(sources, wanted, count, start)


@dataclass(frozen=True, slots=True)
class _Start:
    attempt: int
    time_ns: int


def _again(sources: Sources, wanted: LineFilter, count: int, start: _Start) -> Iterator[pb.StoredLine]:
    """The last lines in a second pass, without keeping any. Lines of the first one's moment may lie before it."""
    later = [(attempt, source) for attempt, source in sources if attempt >= start.attempt]

    def lines() -> Iterator[pb.StoredLine]:
        for attempt, source in later:
            since = max(wanted.from_time_ns, start.time_ns) if attempt == start.attempt else wanted.from_time_ns
            yield from every([(attempt, source)], replace(wanted, from_time_ns=since))

    surplus = sum(1 for _ in lines()) - count
    return islice(lines(), max(0, surplus), None)


def _backwards(sources: Sources, wanted: LineFilter) -> Iterator[pb.StoredLine]:
    for attempt, source in reversed(sources):
        for line in source.lines(wanted, backwards=True):
            yield pb.StoredLine(attempt=attempt, line=line)


def pages(
    lines: Iterator[pb.StoredLine], max_lines: int = 500, max_bytes: int = 1 << 20
) -> Iterator[pb.ReadLogsResponse]:
    """Lines in answers of bounded size."""
    page = pb.ReadLogsResponse()
    size = 0
    for line in lines:
        page.lines.append(line)
        size += len(line.line.text) + _LINE_BYTES
        if len(page.lines) >= max_lines or size >= max_bytes:
            yield page
            page, size = pb.ReadLogsResponse(), 0
    if page.lines:
        yield page
