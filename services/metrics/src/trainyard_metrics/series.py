"""Series of a run, or of a job: its attempts' runs, stitched."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate

import numpy as np
from servicekit.errors import InvalidArgument
from trainyard_protos.v1 import metrics_pb2 as pb

from trainyard_metrics.domain.columns import Columns, Floats, Ints, Mask, join
from trainyard_metrics.domain.sampling import downsample
from trainyard_metrics.domain.stitch import Attempt, Segment, timeline
from trainyard_metrics.points import PointCache, RunPoints
from trainyard_metrics.settings import Settings

AGENT_RANK = -1
_MAX_SEQ = 2**63 - 1
_MAX_PATTERNS = 1000
_MAX_PATTERN = 256
_MAX_RESPONSE_BYTES = 15 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Series:
    """One name of one rank; ordered by attempt, then step, then time."""

    name: str
    rank: int
    attempt: Ints
    step: Ints
    time_ns: Ints
    value: Floats

    def take(self, rows: Mask | Ints) -> Series:
        """Some of its points."""
        return replace(
            self,
            attempt=self.attempt[rows],
            step=self.step[rows],
            time_ns=self.time_ns[rows],
            value=self.value[rows],
        )


@dataclass(frozen=True, slots=True)
class SeriesReader:
    """Answers questions about series."""

    points: PointCache
    settings: Settings

    async def read(self, attempts: Sequence[Attempt], selector: pb.SeriesSelector) -> list[Series]:
        """The series that a selector names, of these runs.

        Raises:
            DataLoss: records are damaged.
        """
        runs = {attempt.run_id: await self.points.load(attempt.run_id) for attempt in attempts}
        return await asyncio.to_thread(_collect, attempts, runs, selector)

    async def infos(self, attempts: Sequence[Attempt], selector: pb.SeriesSelector) -> list[pb.SeriesInfo]:
        """Count, last value and range of each series."""
        return [_info(series) for series in await self.read(attempts, selector)]

    async def query(self, attempts: Sequence[Attempt], request: pb.QuerySeriesRequest) -> pb.QuerySeriesResponse:
        """Points of each series, at most `max_points` of each.

        Raises:
            InvalidArgument: TooManyPoints, BadMaxPoints.
        """
        if request.max_points < 0 or request.max_points == 1:
            raise InvalidArgument(
                f"max_points {request.max_points}", reason="BadMaxPoints", hint="use 0 for all points, or at least 2"
            )
        found = await self.read(attempts, request.selector)
        return await asyncio.to_thread(self._answer, found, request)

    def _answer(self, found: Sequence[Series], request: pb.QuerySeriesRequest) -> pb.QuerySeriesResponse:
        response = pb.QuerySeriesResponse()
        left = self.settings.max_query_points
        for series in found:
            chosen = _within_steps(series, request)
            kept = chosen.take(downsample(chosen.value, request.max_points)) if request.max_points else chosen
            left -= len(kept.value)
            if left < 0:
                raise _too_many(f"more than {self.settings.max_query_points:,} points")
            _add(response, kept, len(chosen.value))
            if response.ByteSize() > _MAX_RESPONSE_BYTES:
                raise _too_many(f"more points than fit into one answer of {_MAX_RESPONSE_BYTES >> 20} MiB")
        return response


def _collect(attempts: Sequence[Attempt], runs: dict[str, RunPoints], selector: pb.SeriesSelector) -> list[Series]:
    stitched = selector.WhichOneof("of") == "job_id" and not selector.include_hidden
    segments = {segment.run_id: segment for segment in timeline(attempts, lambda run: runs[run].columns.writers)}
    wanted = _name_filter(selector.names)
    parts: list[Columns] = []
    fences: list[Ints] = []
    for attempt in sorted(attempts, key=lambda attempt: attempt.fence):
        run = runs[attempt.run_id]
        rows = _named(run, wanted)
        if stitched:
            rows &= _visible(run, segments.get(attempt.run_id))
        part = run.columns.take(rows)
        parts.append(part)
        fences.append(np.full(len(part), attempt.fence, np.int64))
    return list(_split(join(parts), np.concatenate([*fences, np.empty(0, np.int64)])))


def _name_filter(patterns: Sequence[str]) -> re.Pattern[str]:
    # Patterns are compiled into one expression, which takes time and memory that grow with them.
    if len(patterns) > _MAX_PATTERNS or any(len(pattern) > _MAX_PATTERN for pattern in patterns):
        raise InvalidArgument(
            f"{len(patterns):,} patterns of names",
            reason="TooManyNames",
            hint=f"give at most {_MAX_PATTERNS:,} of at most {_MAX_PATTERN} characters; '*' stands for any text",
        )
    return re.compile("|".join(translate(pattern) for pattern in patterns) or ".*", re.DOTALL)


def _named(run: RunPoints, wanted: re.Pattern[str]) -> Mask:
    chosen = np.array([wanted.fullmatch(name) is not None for name in run.columns.names], np.bool_)
    columns = run.columns
    rows: Mask = chosen[columns.name] if len(columns) else np.empty(0, np.bool_)
    return rows


def _visible(run: RunPoints, segment: Segment | None) -> Mask:
    """Points that no rewind hid. What the agent measures belongs to the clock, not to steps: no rewind hides it."""
    columns = run.columns
    of_agent: Mask = columns.rank == AGENT_RANK
    if segment is None or not len(columns):
        return of_agent
    if segment.cut is None:
        return np.ones(len(columns), np.bool_)
    limits = np.array([min(segment.cut.get(writer, 0), _MAX_SEQ) for writer in columns.writers], np.int64)
    before: Mask = columns.row < limits[columns.writer]
    return of_agent | before


def _split(columns: Columns, fence: Ints) -> Iterator[Series]:
    if not len(columns):
        return
    order = np.lexsort((columns.time_ns, columns.step, fence, columns.rank, columns.name))
    name, rank = columns.name[order], columns.rank[order]
    starts = np.flatnonzero(np.diff(name, prepend=-1) | np.diff(rank, prepend=rank[0] - 1))
    found = [
        Series(
            columns.names[columns.name[rows[0]]],
            int(columns.rank[rows[0]]),
            fence[rows],
            columns.step[rows],
            columns.time_ns[rows],
            columns.value[rows],
        )
        for rows in np.split(order, starts[1:])
    ]
    yield from sorted(found, key=lambda series: (series.name, series.rank))


def _within_steps(series: Series, request: pb.QuerySeriesRequest) -> Series:
    if not (request.HasField("from_step") or request.HasField("to_step")):
        return series
    rows = np.ones(len(series.value), np.bool_)
    if request.HasField("from_step"):
        rows &= series.step >= request.from_step
    if request.HasField("to_step"):
        rows &= series.step <= request.to_step
    return series.take(rows)


def _info(series: Series) -> pb.SeriesInfo:
    numbers = series.value[~np.isnan(series.value)]
    return pb.SeriesInfo(
        name=series.name,
        rank=series.rank,
        count=len(series.value),
        last_step=int(series.step[-1]),
        last_value=float(series.value[-1]),
        last_time_ns=int(series.time_ns[-1]),
        min_value=float(numbers.min()) if len(numbers) else float("nan"),
        max_value=float(numbers.max()) if len(numbers) else float("nan"),
    )


def _add(response: pb.QuerySeriesResponse, series: Series, total: int) -> None:
    response.series.add(
        name=series.name,
        rank=series.rank,
        step=series.step.tolist(),
        time_ns=series.time_ns.tolist(),
        value=series.value.tolist(),
        attempt=series.attempt.tolist(),
        total=total,
    )


def _too_many(what: str) -> InvalidArgument:
    return InvalidArgument(what, reason="TooManyPoints", hint="set max_points, fewer names, or a range of steps")
