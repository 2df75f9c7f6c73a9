"""Series of a run, or of a job: its attempts' runs, stitched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from servicekit.errors import InvalidArgument
from trainyard_protos.v1 import metrics_pb2 as pb

from trainyard_metrics import visible
from trainyard_metrics.answers import Answers
from trainyard_metrics.domain.columns import Columns, Floats, Ints, Mask
from trainyard_metrics.domain.sampling import downsample
from trainyard_metrics.domain.summary import Summary, groups
from trainyard_metrics.reading import Reader
from trainyard_metrics.selecting import Selection
from trainyard_metrics.settings import Settings
from trainyard_metrics.summaries import Summaries
from trainyard_metrics.visible import Source

_MAX_RESPONSE_BYTES = 15 * 1024 * 1024
_POINTS_AT_ONCE = 4_000_000


@dataclass
class Seen:
    """What a watcher was told."""

    summary: Summary | None = None
    revision: int = 0
    sent: dict[tuple[str, int], bytes] = field(default_factory=dict)  # encoded, because a NaN does not equal itself


@dataclass(frozen=True, slots=True)
class Series:
    """One name of one rank; ordered by attempt, then step, then time."""

    name: str
    rank: int
    attempt: Ints
    step: Ints
    time_ns: Ints
    value: Floats

    def take(self, rows: Mask | Ints | slice) -> Series:
        """Some of its points."""
        return replace(
            self,
            attempt=self.attempt[rows],
            step=self.step[rows],
            time_ns=self.time_ns[rows],
            value=self.value[rows],
        )


class _Piece(NamedTuple):
    """Points of one series that were stored together: views."""

    fence: int
    step: Ints
    time_ns: Ints
    value: Floats


class SeriesReader:
    """Answers questions about series: from summaries where they tell enough, else from points."""

    def __init__(self, reader: Reader, summaries: Summaries, settings: Settings) -> None:
        self._reader = reader
        self._summaries = summaries
        self._settings = settings
        self._answers = Answers(settings.max_cached_bytes)

    async def infos(self, selection: Selection) -> list[pb.SeriesInfo]:
        """Count, last value and range of each series, by name and rank.

        Raises:
            DataLoss: records are damaged.
        """
        summary = await self._summary(selection)
        found = _infos(summary, range(len(summary)), selection)
        return sorted(found, key=lambda info: (info.name, info.rank))

    async def changes(self, selection: Selection, seen: Seen) -> list[pb.SeriesInfo]:
        """What changed since a watcher looked last."""
        summary = await self._summary(selection)
        indexes = summary.changed(seen.revision).tolist() if summary is seen.summary else range(len(summary))
        seen.summary, seen.revision = summary, summary.revision
        fresh = []
        for info in _infos(summary, indexes, selection):
            encoded = info.SerializeToString()
            if seen.sent.get((info.name, info.rank)) != encoded:
                seen.sent[info.name, info.rank] = encoded
                fresh.append(info)
        return fresh

    async def query(self, selection: Selection, request: pb.QuerySeriesRequest) -> pb.QuerySeriesResponse:
        """Points of each series, at most `max_points` of each.

        Raises:
            InvalidArgument: TooManyPoints, BadMaxPoints.
            DataLoss: records are damaged.
        """
        if request.max_points < 0 or 0 < request.max_points < 3:
            raise InvalidArgument(
                f"max_points {request.max_points}", reason="BadMaxPoints", hint="use 0 for all points, or at least 3"
            )
        sources = await self._sources(selection)
        key = _key(selection, sources, request)
        answer = self._answers.get(key)
        if answer is None:
            answer = await self._reader.run(lambda: self._answer(sources, selection, request))
            self._answers.put(key, answer)
        return answer

    async def _summary(self, selection: Selection) -> Summary:
        if selection.summarised is not None:
            return (await self._summaries.of_job(selection.summarised)).summary
        if not selection.attempts:
            return Summary()
        sources = await self._sources(selection)
        return await self._reader.run(lambda: visible.summarise(sources, selection.names))

    async def _sources(self, selection: Selection) -> list[Source]:
        snapshots = await self._reader.snapshots(attempt.run_id for attempt in selection.attempts)
        select = visible.stitched if selection.stitched else visible.whole
        return select(selection.attempts, snapshots)

    def _answer(
        self, sources: Sequence[Source], selection: Selection, request: pb.QuerySeriesRequest
    ) -> pb.QuerySeriesResponse:
        response = pb.QuerySeriesResponse()
        points, size = self._settings.max_query_points, _MAX_RESPONSE_BYTES
        for series in _read(sources, selection):
            chosen = _within_steps(series, request)
            kept = chosen.take(downsample(chosen.value, request.max_points)) if request.max_points else chosen
            points -= len(kept.value)
            if points < 0:
                raise _too_many(f"more than {self._settings.max_query_points:,} points")
            size -= _add(response, kept, len(chosen.value))
            if size < 0:
                raise _too_many(f"more points than fit into one answer of {_MAX_RESPONSE_BYTES >> 20} MiB")
        return response


def _infos(summary: Summary, indexes: Iterable[int], selection: Selection) -> Iterator[pb.SeriesInfo]:
    for index in indexes:
        name = summary.names[index]
        if selection.names is None or selection.names(name):
            rank, count, step, time_ns, value, low, high = summary.entries[index].tolist()
            yield pb.SeriesInfo(
                name=name,
                rank=rank,
                count=count,
                last_step=step,
                last_value=value,
                last_time_ns=time_ns,
                min_value=low,
                max_value=high,
            )


def _read(sources: Sequence[Source], selection: Selection) -> Iterator[Series]:
    """The series in the order of name and rank, so many names at a time as fit into memory."""
    stored = {name for source in sources for name in source.snapshot.names}
    wanted = sorted(stored if selection.names is None else filter(selection.names, stored))
    points = sum(source.snapshot.count_points for source in sources) * len(wanted) // max(1, len(stored))
    size = max(1, len(wanted) * _POINTS_AT_ONCE // max(_POINTS_AT_ONCE, points))
    for start in range(0, len(wanted), size):
        names = frozenset(wanted[start : start + size])
        pieces: dict[tuple[str, int], list[_Piece]] = {}
        for source in sources:
            for part in source.read(names):
                _split(part, source.fence, pieces)
        for (name, rank), found in sorted(pieces.items()):
            yield _ordered(_joined(name, rank, found))


def _split(part: Columns, fence: int, pieces: dict[tuple[str, int], list[_Piece]]) -> None:
    for first, rows in groups(part):
        key = part.names[part.name[first]], int(part.rank[first])
        piece = _Piece(fence, part.step[rows], part.time_ns[rows], part.value[rows])
        pieces.setdefault(key, []).append(piece)


def _joined(name: str, rank: int, pieces: Sequence[_Piece]) -> Series:
    sizes = [len(piece.value) for piece in pieces]
    return Series(
        name,
        rank,
        np.repeat(np.array([piece.fence for piece in pieces], np.int64), sizes),
        np.concatenate([piece.step for piece in pieces]),
        np.concatenate([piece.time_ns for piece in pieces]),
        np.concatenate([piece.value for piece in pieces]),
    )


def _ordered(series: Series) -> Series:
    # What is in order already, as nearly everything is, need not be sorted: that takes longer than reading it.
    attempt, step, time_ns = series.attempt, series.step, series.time_ns
    rising = step[1:] > step[:-1]
    if not rising.all():
        rising |= (step[1:] == step[:-1]) & (time_ns[1:] >= time_ns[:-1])
    later = attempt[1:] > attempt[:-1]
    if (later | (rising & (attempt[1:] == attempt[:-1]))).all():
        return series
    return series.take(np.lexsort((time_ns, step, attempt)))


def _within_steps(series: Series, request: pb.QuerySeriesRequest) -> Series:
    if not (request.HasField("from_step") or request.HasField("to_step")):
        return series
    rows = np.ones(len(series.value), np.bool_)
    if request.HasField("from_step"):
        rows &= series.step >= request.from_step
    if request.HasField("to_step"):
        rows &= series.step <= request.to_step
    # Steps mostly rise, and then the points within a range are next to each other: a view instead of copies.
    first, count = int(rows.argmax()), int(np.count_nonzero(rows))
    together = slice(first, first + count)
    return series.take(together if rows[together].all() else rows)


def _add(response: pb.QuerySeriesResponse, series: Series, total: int) -> int:
    """Adds a series; returns the bytes it takes."""
    added = response.series.add(
        name=series.name,
        rank=series.rank,
        step=series.step.tolist(),
        time_ns=series.time_ns.tolist(),
        value=series.value.tolist(),
        attempt=series.attempt.tolist(),
        total=total,
    )
    return added.ByteSize()


def _key(selection: Selection, sources: Sequence[Source], request: pb.QuerySeriesRequest) -> bytes:
    """What an answer depends on: the question, the cuts, and what is stored."""
    stored = [(source.snapshot.run_id, sorted(source.snapshot.positions.items())) for source in sources]
    return repr((request.SerializeToString(deterministic=True), selection.attempts, stored)).encode()


def _too_many(what: str) -> InvalidArgument:
    return InvalidArgument(what, reason="TooManyPoints", hint="set max_points, fewer names, or a range of steps")
