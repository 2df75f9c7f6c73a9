"""What the trackers of a node have written: how far training is, its newest values, the cut of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainyard_protos.v1 import common_pb2

from trainyard.agent.sources import TrackerSource
from trainyard.tracker.records import SUFFIX, Facts, LogReader, Points, ProgressMade, Record

MAX_METRICS = 64


class _Log:
    """One tracker's log, read for shipping, for progress, and for cuts."""

    def __init__(self, path: Path) -> None:
        self.source = TrackerSource(path)
        self.reader = LogReader(path)
        self._before_last_cut = self.reader.fork()
        self.values: dict[str, float] = {}  # newest at the last cut

    def cut(self, until_ns: int, step: int) -> int:
        """The first number that is not in a checkpoint of `step` whose file last changed at `until_ns`; fills `values`.

        That is the newest record written before the change, plus records right behind it of the same step, because a
        script may log a step just after saving it.
        """
        reader = self._before_last_cut.fork()
        position = reader.next_seq
        while True:
            self._before_last_cut = reader.fork()
            for record in reader.read():
                if isinstance(record, Points):
                    if record.time_ns > until_ns and record.step != step:
                        return position
                    position = record.next_seq
                    self.values.update(zip(record.names, record.values, strict=True))
            if reader.offset == self._before_last_cut.offset:
                return position


class Tracked:
    """Follows every log in a node's tracker folder.

    Attributes:
        on_facts: called with params, tags and notes as they appear.
        last_heard_s: monotonic time of the newest record seen; None before the first.
    """

    def __init__(self, folder: Path, facts: Callable[[dict[str, Any]], None]) -> None:
        self._folder = folder
        self._facts = facts
        self._logs: dict[str, _Log] = {}
        self._ranks: dict[str, int] = {}  # of the newest value of each metric
        self._first: tuple[int, int] | None = None  # step and time of the first progress
        self._said = False
        self.progress = common_pb2.Progress()
        self.last_heard_s: float | None = None

    @property
    def sources(self) -> Iterator[TrackerSource]:
        """The logs, to be shipped."""
        return (log.source for log in self._logs.values())

    def look(self) -> bool:
        """Reads what is new; whether there was anything."""
        self._find()
        new = False
        for log in self._logs.values():
            for record in log.reader.read():
                new = True
                self._take(record, log.source.rank)
        if new:
            self.last_heard_s = time.monotonic()
        return new

    def cut(self, until_ns: int, step: int) -> tuple[dict[str, int], dict[str, float]]:
        """Of a checkpoint: positions (writer id -> first number not in it), and the newest values there."""
        self._find()
        positions: dict[str, int] = {}
        values: dict[str, float] = {}
        # The lowest rank last: where several log the same name, its value counts.
        for log in sorted(self._logs.values(), key=lambda each: -each.source.rank):
            positions[log.source.writer_id] = log.cut(until_ns, step)
            values.update(log.values)
        return positions, values

    def _find(self) -> None:
        for path in self._folder.iterdir():
            if path.suffix == SUFFIX and path.name not in self._logs:
                try:
                    self._logs[path.name] = _Log(path)
                except ValueError:
                    continue  # its writer is just about to write the header

    def _take(self, record: Record, rank: int) -> None:
        match record:
            case Points():
                for name, value in zip(record.names, record.values, strict=True):
                    self._newest(name, value, rank)
                if not self._said:
                    self._advance(record.step, 0, record.time_ns)
            case ProgressMade():
                self._said = True  # what a script says itself outweighs what its points let guess
                self._advance(record.step, record.total, record.time_ns)
            case Facts():
                self._facts(record.values)

    def _newest(self, name: str, value: float, rank: int) -> None:
        """Keeps the value of the lowest rank that logs this name."""
        metrics = self.progress.metrics
        known = self._ranks.get(name)
        if known is None and len(metrics) >= MAX_METRICS:
            return
        if known is None or rank <= known:
            self._ranks[name] = rank
            metrics[name] = value

    def _advance(self, step: int, total: int, time_ns: int) -> None:
        progress = self.progress
        if self._first is None:
            self._first = (step, time_ns)
        progress.step = max(progress.step, step)
        progress.total_steps = total or progress.total_steps
        progress.updated_ns = max(progress.updated_ns, time_ns)
        first_step, first_ns = self._first
        if progress.total_steps and step > first_step and time_ns > first_ns:
            per_step_s = (time_ns - first_ns) / 1e9 / (step - first_step)
            progress.seconds_left = max(0, progress.total_steps - step) * per_step_s
