"""Stored lines of output, attempt after attempt, in the order of time, in answers of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from servicekit.errors import InvalidArgument
from trainyard_protos.v1 import metrics_pb2 as pb
from trainyard_protos.v1.common_pb2 import LogLine

from trainyard_metrics.domain.lines import Key, LineFilter
from trainyard_metrics.storage.snapshot import Snapshot

_MAX_REGEX = 1024
_TAIL_BYTES = 16 * 1024 * 1024
_LINE_BYTES = 64  # what a line takes beside its text
# A page is all that a reader holds that stands still: there may be hundreds of them.
_PAGE_LINES = 500
_PAGE_BYTES = 64 * 1024

Sources = Sequence[tuple[int, Snapshot]]
"""Attempts, oldest first, each with what is stored of it."""
Found = tuple[int, Key, LogLine]
"""A line with its attempt and its place in the order of the attempt's lines."""


class Position(NamedTuple):
    """A line's place in the order."""

    attempt: int
    key: Key


def position_of(message: pb.LogPosition) -> Position:
    """The position that a message stands for."""
    return Position(message.attempt, (message.time_ns, message.writer_id, message.seq))


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


def read(
    sources: Sources, wanted: LineFilter, tail: int, after: Position | None, ends: Mapping[int, int]
) -> Iterator[pb.ReadLogsResponse]:
    """The lines, or (`tail` > 0) the last of them, in pages.

    Args:
        after: only lines behind this one; `tail` does not count then.
        ends: by attempt: only lines up to this time.
    """
    if tail and after is None:
        return pages(last(sources, wanted, tail))
    return pages(found for found in every(sources, wanted, after) if found[1][0] <= ends[found[0]])


def every(sources: Sources, wanted: LineFilter, after: Position | None = None) -> Iterator[Found]:
    """All lines, in order.

    Args:
        after: only lines behind this one.
    """
    for attempt, source in sources:
        behind = after.key if after is not None and attempt == after.attempt else None
        for key, line in source.keyed_lines(wanted, after=behind):
            yield attempt, key, line


def last(sources: Sources, wanted: LineFilter, count: int, room: int = _TAIL_BYTES) -> Iterator[Found]:
    """The last `count` lines, in order. They are found from the end; what fits into `room` bytes is read only once."""
    found: list[Found] = []
    start = None
    for attempt, key, line in islice(_backwards(sources, wanted), count):
        room -= len(line.text) + _LINE_BYTES
        start = _Start(attempt, line.time_ns)
        if room >= 0:
            found.append((attempt, key, line))
    if start is None or room >= 0:
        yield from reversed(found)
        return
    found.clear()
    yield from _again(sources, wanted, count, start)


@dataclass(frozen=True, slots=True)
class _Start:
    attempt: int
    time_ns: int


def _again(sources: Sources, wanted: LineFilter, count: int, start: _Start) -> Iterator[Found]:
    """The last lines in a second pass, without keeping any. Lines of the first one's moment may lie before it."""
    later = [(attempt, source) for attempt, source in sources if attempt >= start.attempt]

    def lines() -> Iterator[Found]:
        for attempt, source in later:
            since = max(wanted.from_time_ns, start.time_ns) if attempt == start.attempt else wanted.from_time_ns
            yield from every([(attempt, source)], replace(wanted, from_time_ns=since))

    surplus = sum(1 for _ in lines()) - count
    return islice(lines(), max(0, surplus), None)


def _backwards(sources: Sources, wanted: LineFilter) -> Iterator[Found]:
    for attempt, source in reversed(sources):
        for key, line in source.keyed_lines(wanted, backwards=True):
            yield attempt, key, line


def pages(
    lines: Iterator[Found], max_lines: int = _PAGE_LINES, max_bytes: int = _PAGE_BYTES
) -> Iterator[pb.ReadLogsResponse]:
    """Lines in answers of bounded size, each with the position of its last line."""
    page = pb.ReadLogsResponse()
    size = 0
    for attempt, key, line in lines:
        page.lines.add(attempt=attempt, line=line)
        size += len(line.text) + _LINE_BYTES
        if len(page.lines) >= max_lines or size >= max_bytes:
            yield _at(page, Position(attempt, key))
            page, size = pb.ReadLogsResponse(), 0
    if page.lines:
        yield _at(page, Position(attempt, key))


def _at(page: pb.ReadLogsResponse, position: Position) -> pb.ReadLogsResponse:
    time_ns, writer, seq = position.key
    page.position.attempt, page.position.time_ns = position.attempt, time_ns
    page.position.writer_id, page.position.seq = writer, seq
    return page
