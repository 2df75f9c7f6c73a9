"""Where shipped records come from: the journal of lines, the trackers' logs, the agent's own samples."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from trainyard_protos.v1 import common_pb2, metrics_pb2

from trainyard.agent.spool import Spool
from trainyard.tracker.records import LogReader, Points

LINES_PER_BATCH = 2_000
POINTS_PER_BATCH = 10_000
BATCH_BYTES = 1024 * 1024
BLOCK_BYTES = 64 * 1024
MAX_SAMPLES = 20_000


class LineSource:
    """Lines that the spool keeps until metrics has them."""

    def __init__(self, writer_id: str, spool: Spool) -> None:
        self.writer_id = writer_id
        self._spool = spool

    def batch(self, seq: int) -> metrics_pb2.AppendRequest | None:
        records = self._spool.read(seq, LINES_PER_BATCH, BATCH_BYTES)
        if not records:
            return None
        lines = metrics_pb2.AppendRequest.Lines(lines=map(common_pb2.LogLine.FromString, records))
        return metrics_pb2.AppendRequest(first_seq=seq, lines=lines)

    def acknowledge(self, seq: int) -> None:
        self._spool.forget(seq)


class Columns:
    """Points being gathered into one batch."""

    def __init__(self, rank: int) -> None:
        self._points = metrics_pb2.Points(rank=rank)
        self._names: dict[str, int] = {}

    def add(self, name: str, step: int, time_ns: int, value: float) -> None:
        index = self._names.setdefault(name, len(self._names))
        self._points.name.append(index)
        self._points.step.append(step)
        self._points.time_ns.append(time_ns)
        self._points.value.append(value)

    def __len__(self) -> int:
        return len(self._points.name)

    def request(self, first_seq: int) -> metrics_pb2.AppendRequest | None:
        if not self._names:
            return None
        self._points.names.extend(self._names)
        return metrics_pb2.AppendRequest(first_seq=first_seq, points=self._points)


class TrackerSource:
    """Points of one tracker's log. The file is the only copy: what got lost on its way is read again."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ValueError: the log has no header yet.
        """
        self._start = LogReader(path)
        self._behind = self._start  # where to read on: at the acknowledged position, or a little before
        self.writer_id = str(uuid.UUID(bytes=self._start.writer_id))
        self.rank = self._start.rank

    def batch(self, seq: int) -> metrics_pb2.AppendRequest | None:
        if seq < self._behind.next_seq:
            self._behind = self._start
        columns = Columns(self.rank)
        reader = self._behind.fork()
        while len(columns) < POINTS_PER_BATCH:
            if reader.next_seq <= seq:
                self._behind = reader.fork()
            begun = reader.offset
            for record in reader.read(BLOCK_BYTES):
                if isinstance(record, Points):
                    _add_from(columns, record, seq)
            if reader.offset == begun:
                break
        return columns.request(seq)

    def acknowledge(self, seq: int) -> None:
        """Nothing to forget: the log stays until the attempt's folder goes."""


def _add_from(columns: Columns, points: Points, seq: int) -> None:
    values = zip(points.names, points.values, strict=True)
    for number, (name, value) in enumerate(values, points.first_seq):
        if number >= seq:
            columns.add(name, points.step, points.time_ns, value)


class SampleSource:
    """What the agent itself measured; lost with the agent, and bounded when metrics is away."""

    def __init__(self, writer_id: str, rank: int) -> None:
        self.writer_id = writer_id
        self._rank = rank
        self._first_seq = 0
        self._samples: deque[tuple[str, int, float, int]] = deque()

    @property
    def next_seq(self) -> int:
        return self._first_seq + len(self._samples)

    def add(self, values: Iterable[tuple[str, float]], time_ns: int, step: int) -> None:
        """Adds samples; when metrics was away for too long, new ones are dropped, because numbers may have no holes."""
        if len(self._samples) < MAX_SAMPLES:
            self._samples.extend((name, time_ns, value, step) for name, value in values)

    def batch(self, seq: int) -> metrics_pb2.AppendRequest | None:
        columns = Columns(self._rank)
        for index, (name, time_ns, value, step) in enumerate(self._samples, self._first_seq):
            if index >= seq and len(columns) < POINTS_PER_BATCH:
                columns.add(name, step, time_ns, value)
        return columns.request(seq)

    def acknowledge(self, seq: int) -> None:
        while self._samples and self._first_seq < seq:
            self._samples.popleft()
            self._first_seq += 1
