"""What the trackers of a node have written: how far training is, its newest values, the cut of a checkpoint."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard_protos.v1 import common_pb2

from trainyard.agent.followed import FollowedLog
from trainyard.agent.pace import Pace
from trainyard.agent.sources import SampleSource, Source
from trainyard.tracker.reading import Stretch
from trainyard.tracker.records import SUFFIX

MAX_METRICS = 64
# A folder that changed less than that before it was read may change again without its time telling.
FILE_CLOCK_TICK_S = 1.0
DROPPED = "system/dropped_rows"


@dataclass(slots=True)
class Cut:
    """Where a checkpoint ends in the logs of a node.

    Attributes:
        positions: of each writer, the number of the first row that is not in it.
        values: newest values there.
        step: the checkpoint's, or the lowest rank's highest one there if that is beyond it: files may count epochs.
        ranks: whose logs they are.
    """

    positions: dict[str, int]
    values: dict[str, float]
    step: int
    ranks: set[int]


class Tracked:
    """Follows every log in a node's tracker folder.

    Attributes:
        progress: how far training is, and its newest values.
        last_heard_s: monotonic time of the newest record seen; None before the first.
    """

    def __init__(
        self,
        folder: Path,
        *,
        facts: Callable[[dict[str, Any]], None] = lambda _: None,
        complain: Callable[[str], None] = lambda _: None,
        cuts_within_s: float = 0,
    ) -> None:
        """
        Args:
            facts: called with params, tags and notes as they appear.
            complain: called when a tracker had to drop rows, once for each.
            cuts_within_s: how late `cut` may be asked for a moment; younger rows stay on disk for that. Later, the
                answer is the end of a segment after that moment.
        """
        self._folder = folder
        self._facts = facts
        self._complain = complain
        self._cuts_within_ns = int(cuts_within_s * 1e9)
        self._logs: dict[str, FollowedLog] = {}
        self._dropped: dict[str, SampleSource] = {}
        self._folder_changed_ns = -1  # as the folder says, whatever steps the wall clock made
        self._change_seen_s = self._looked_for_logs_s = 0.0  # monotonic
        self._ranks: dict[str, int] = {}  # of the newest value of each metric
        self._said = False
        self._pace = Pace()
        self.progress = common_pb2.Progress()
        self.last_heard_s: float | None = None

    @property
    def sources(self) -> Iterator[Source]:
        """What is to be shipped."""
        yield from (log.source for log in self._logs.values())
        yield from self._dropped.values()

    @property
    def logs(self) -> Iterator[FollowedLog]:
        """The logs themselves."""
        return iter(self._logs.values())

    def look(self) -> bool:
        """Reads what is new, some of it at least; whether there was anything."""
        self._find()
        new = False
        for log in self._logs.values():
            dropped_before = log.dropped
            for stretch in log.look():
                new = True
                self._take(stretch, log.source.rank)
            if log.dropped > dropped_before:
                self._note_dropped(log)
            log.give_back(time.time_ns() - self._cuts_within_ns)
        if new:
            self.last_heard_s = time.monotonic()
        return new

    def cut(self, until_ns: int, step: int) -> Cut:
        """Of a checkpoint of `step` whose file last changed at `until_ns`."""
        self._find()
        cut = Cut({}, {}, step, set())
        # The lowest rank last: where several log the same name, its value counts.
        for log in sorted(self._logs.values(), key=lambda each: -each.source.rank):
            cut.positions[log.source.writer_id], newest = log.cut(until_ns, step)
            cut.values.update(newest.values)
            cut.ranks.add(log.source.rank)
            if newest.step is not None:
                cut.step = max(step, newest.step)
        return cut

    def _find(self) -> None:
        """New logs. The folder is read only when it changed: after a long outage it holds thousands of segments."""
        changed_ns, now_s = self._folder.stat().st_mtime_ns, time.monotonic()
        if changed_ns != self._folder_changed_ns:
            self._folder_changed_ns, self._change_seen_s = changed_ns, now_s
        elif self._looked_for_logs_s > self._change_seen_s + FILE_CLOCK_TICK_S:
            return
        self._looked_for_logs_s = now_s
        first: dict[str, int] = {}
        for path in self._folder.iterdir():
            writer, _, number = path.stem.partition(".")
            if path.suffix == SUFFIX and writer not in self._logs and number.isdecimal():
                first[writer] = min(first.get(writer, int(number)), int(number))
        for writer, index in first.items():
            try:
                self._logs[writer] = FollowedLog(self._folder, writer, index)
            except ValueError:
                self._folder_changed_ns = -1  # its writer is just about to write the header

    def _take(self, stretch: Stretch, rank: int) -> None:
        for group in stretch.groups:
            for index in (0, -1):
                step, time_ns, values = group.row(index)
                if not self._said:
                    self._advance(step, 0, time_ns)
            for name, value in zip(group.names, values, strict=True):
                self._newest(name, value, rank)
        for said in stretch.progress:
            if not self._said:
                # What a script says itself outweighs what its rows let guess.
                self._said, self._pace = True, Pace()
            self._advance(said.step, said.total, said.time_ns)
        for facts in stretch.facts:
            self._facts(facts)

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
        self._pace.add(step, time_ns)
        progress.step = max(progress.step, step)
        progress.total_steps = total or progress.total_steps
        progress.updated_ns = max(progress.updated_ns, time_ns)
        if (left := self._pace.seconds_left(progress.total_steps)) is not None:
            progress.seconds_left = left

    def _note_dropped(self, log: FollowedLog) -> None:
        rank = log.source.rank
        if log.source.writer_id not in self._dropped:
            # A writer of its own for every reader: who comes after this process counts on.
            writer_id = f"{log.source.writer_id}/dropped/{uuid.uuid4()}"
            self._dropped[log.source.writer_id] = SampleSource(writer_id, rank)
            self._complain(f"the disk of this machine is full: rank {rank} drops what it logs until there is room")
        row = [(DROPPED, float(log.dropped))]
        self._dropped[log.source.writer_id].add(row, time.time_ns(), self.progress.step)
