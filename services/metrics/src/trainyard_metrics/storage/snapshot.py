"""What is durable of a run at one moment: the one way to read it.

A snapshot is made in the event loop and read in a thread. It holds the files it reads, so that compaction may replace
them meanwhile, and reads through descriptors of its own, so that it never waits for a writer and no writer for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from trainyard_protos.v1.common_pb2 import LogLine
from trainyard_protos.v1.metrics_pb2 import AppendRequest

from trainyard_metrics.domain.columns import Columns, join
from trainyard_metrics.domain.gathering import Gatherer, columns
from trainyard_metrics.domain.lines import Key, Line, LineFilter, Step, in_order, matcher, order
from trainyard_metrics.storage.columnfiles import read_lines, read_points
from trainyard_metrics.storage.files import HeldFile
from trainyard_metrics.storage.frames import frames
from trainyard_metrics.storage.manifest import ColumnFile

_GATHERED_BYTES = 32 * 1024 * 1024
_KEPT_FRAMES = 16


class Offsets:
    """Some first elements of an array of offsets that only grows: cheaper than a copy of it."""

    def __init__(self, offsets: array[int]) -> None:
        self._offsets = offsets
        self._count = len(offsets)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (self._offsets[index] for index in range(self._count))

    def __reversed__(self) -> Iterator[int]:
        return (self._offsets[index] for index in range(self._count - 1, -1, -1))


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """A journal segment as far as it was durable: where its frames of rows are, and each writer's frames of lines."""

    held: HeldFile
    size: int
    rows: Offsets
    lines: Mapping[str, Offsets]


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """A column file, held."""

    held: HeldFile
    file: ColumnFile


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The records of a run that were durable when it was made. Its methods block: call them in a thread.

    All of them raise `Damaged` when stored bytes are not what was written, and FileNotFoundError when the run was
    removed meanwhile.

    Attributes:
        positions: of each writer, the first number that is not in it.
        last_line_ns: time of the newest line; 0 without one.
        names: of all series.
        count_points: how many points there are.
    """

    run_id: str
    positions: Mapping[str, int]
    last_line_ns: int
    names: frozenset[str]
    count_points: int
    files: tuple[ColumnPart, ...]
    segments: tuple[SegmentPart, ...]

    @property
    def writers(self) -> Collection[str]:
        """Who wrote."""
        return self.positions.keys()

    def points(
        self,
        names: Callable[[str], bool] | Collection[str] | None = None,
        ranks: Collection[int] | None = None,
        after: Mapping[str, int] | None = None,
    ) -> Columns:
        """Points. Those of one name, rank and writer are in the order of their rows; otherwise the order is not given.

        Args:
            names: a predicate, or a collection; None: all.
            ranks: None: all.
            after: the first row wanted of each writer; from the first for those it lacks.
        """
        return join(list(self.chunks(names, ranks, after)))

    def chunks(
        self,
        names: Callable[[str], bool] | Collection[str] | None = None,
        ranks: Collection[int] | None = None,
        after: Mapping[str, int] | None = None,
    ) -> Iterator[Columns]:
        """The same in parts of bounded size, for those who do not need all of them at once."""
        wanted = _predicate(names)
        chosen = None if ranks is None else frozenset(ranks)
        stored = None if wanted is None else sorted(name for name in self.names if wanted(name))
        if stored is None or stored:
            for part in self.files:
                if part.file.kind == "points":
                    yield from read_points(part.held.path, part.file, stored, chosen, after)
        yield from self._journalled(partial(Gatherer, wanted, chosen, after))

    def _journalled(self, make: Callable[[], Gatherer]) -> Iterator[Columns]:
        gatherer, size = make(), 0
        for segment in filter(lambda segment: len(segment.rows), self.segments):
            for _, requests in frames(segment.held.path, segment.rows):
                for request in requests:
                    if request.HasField("rows"):
                        gatherer.add(request)
                        size += request.ByteSize()
                if size > _GATHERED_BYTES:
                    yield columns(gatherer.chunks())
                    gatherer, size = make(), 0
        yield columns(gatherer.chunks())

    def lines(self, wanted: LineFilter | None = None, *, backwards: bool = False) -> Iterator[LogLine]:
        """Lines by (time, writer, number), or the other way round; reads as far as it is asked to."""
        return (line for _, line in self.keyed_lines(wanted, backwards=backwards))

    def keyed_lines(
        self, wanted: LineFilter | None = None, *, after: Key | None = None, backwards: bool = False
    ) -> Iterator[Line]:
        """The same, each line with its key.

        Args:
            after: only lines behind this key.
        """
        chosen = wanted or LineFilter()
        if after is not None:
            chosen = replace(chosen, from_time_ns=max(chosen.from_time_ns, after[0]))
        sources: list[Iterator[Step]] = [
            read_lines(part.held.path, part.file, chosen, backwards=backwards)
            for part in self.files
            if part.file.kind == "lines"
        ]
        writers = sorted({writer for segment in self.segments for writer in segment.lines})
        frame = lru_cache(_KEPT_FRAMES)(_read_frame)
        sources += [self._of_writer(writer, chosen, frame, backwards) for writer in writers]
        found = in_order(sources, backwards=backwards)
        return found if after is None else (line for line in found if line[0] > after)

    def _of_writer(
        self, writer: str, wanted: LineFilter, frame: Callable[[Path, int], list[AppendRequest]], backwards: bool
    ) -> Iterator[Line]:
        accepts = matcher(wanted)
        for segment in reversed(self.segments) if backwards else self.segments:
            offsets = segment.lines.get(writer, ())
            for offset in reversed(offsets) if backwards else offsets:
                lines = [
                    (order(writer, line), line)
                    for request in frame(segment.held.path, offset)
                    if request.writer_id == writer
                    for line in request.lines.lines
                    if accepts(line)
                ]
                yield from reversed(lines) if backwards else lines


def _read_frame(path: Path, offset: int) -> list[AppendRequest]:
    ((_, requests),) = frames(path, [offset])
    return requests


def _predicate(names: Callable[[str], bool] | Collection[str] | None) -> Callable[[str], bool] | None:
    if names is None or callable(names):
        return names
    chosen = frozenset(names)
    return chosen.__contains__
