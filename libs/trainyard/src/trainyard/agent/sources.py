"""Where shipped records come from: the journal of lines, the trackers' logs, the agent's own samples."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

from trainyard_protos.v1 import common_pb2, metrics_pb2

from trainyard.agent.spool import Spool
from trainyard.tracker.reading import Group, LogReader, Stretch

LINES_PER_BATCH = 2_000
SAMPLES_PER_BATCH = 2_000
BATCH_BYTES = 256 * 1024
COLUMNS_PER_BATCH = 12_000  # of all shapes: metrics takes 16,384, each of which costs it time whatever its rows
MAX_SAMPLES = 4_000


class Gap(Exception):
    """Records are asked for that were given back, because metrics had acknowledged them once."""


class Source(Protocol):
    """Numbered records of one writer."""

    writer_id: str

    def batch(self, seq: int) -> metrics_pb2.AppendRequest | None:
        """Records from number `seq` on, without the ids of run and writer; None when there are none yet.

        Raises:
            Gap: they are gone.
        """
        ...

    def acknowledge(self, seq: int) -> None:
        """Everything below `seq` is stored."""
        ...


class LineSource:
    """Lines that the spool keeps until metrics has them.

    Attributes:
        acknowledged: the number of the first line that metrics does not have, as far as is known.
    """

    def __init__(self, writer_id: str, spool: Spool) -> None:
        self.writer_id = writer_id
        self.acknowledged = 0
        self._spool = spool

    def batch(self, seq: int) -> metrics_pb2.AppendRequest | None:
        records = self._spool.read(seq, LINES_PER_BATCH, BATCH_BYTES)
        if not records:
            return None
        lines = metrics_pb2.AppendRequest.Lines(lines=map(common_pb2.LogLine.FromString, records))
        return metrics_pb2.AppendRequest(first_seq=seq, lines=lines)

    def acknowledge(self, seq: int) -> None:
        self.acknowledged = seq
        self._spool.forget(seq)


class TrackerSource:
    """Rows of one tracker's log. The file is the only copy: what got lost on its way is read again.

    Attributes:
        acknowledged: the number of the first row that metrics does not have, as far as is known.
    """

    def __init__(self, folder: Path, writer: str, index: int) -> None:
        """
        Args:
            index: of the first segment that is there.

        Raises:
            ValueError: the segment has no header yet.
        """
        self._folder = folder
        self._first_index = index
        self._reader = LogReader(folder, writer, index)
        self.writer_id = writer
        self.rank = self._reader.header.rank
        self.acknowledged = 0

    def batch(self, seq: int) -> metrics_pb2.AppendRequest | None:
        if seq < self._reader.next_row:
            self._reader = LogReader(self._folder, self.writer_id, self._first_index)
        if seq < self._reader.next_row:
            raise Gap(
                f"metrics asks for the rows of rank {self.rank} from number {seq:,} on, but had acknowledged all below "
                f"{self._reader.next_row:,}, and so they were removed here; was metrics restored from an old backup?"
            )
        self._reader.skip_to(seq)
        while (stretch := self._read()) is not None:
            if stretch.count:
                return _request(stretch, self.rank)
        return None

    def _read(self) -> Stretch | None:
        """What is next, of not too many columns."""
        before, rows = self._reader.fork(), None
        while (stretch := self._reader.read(BATCH_BYTES, rows)) is not None and _is_wide(stretch):
            rows = stretch.count // 2
            self._reader = before.fork()
        return stretch

    def acknowledge(self, seq: int) -> None:
        self.acknowledged = seq

    def forget(self, index: int) -> None:
        """This segment, which is acknowledged, is about to be removed."""
        self._first_index = index + 1
        self._reader.leave(index)


def _is_wide(stretch: Stretch) -> bool:
    return stretch.count > 1 and sum(len(group.names) for group in stretch.groups) > COLUMNS_PER_BATCH


def _request(stretch: Stretch, rank: int) -> metrics_pb2.AppendRequest:
    alone = len(stretch.groups) == 1
    rows = metrics_pb2.Rows(rank=rank, count=stretch.count, blocks=[_block(group, alone) for group in stretch.groups])
    return metrics_pb2.AppendRequest(first_seq=stretch.first_row, rows=rows)


def _block(group: Group, alone: bool) -> metrics_pb2.Block:
    return metrics_pb2.Block(
        names=group.names,
        row=b"" if alone else _pack("I", group.numbers),
        step=group.steps(),
        time_ns=group.times_ns(),
        value=b"".join(map(group.column, range(len(group.names)))),
    )


def _pack(kind: str, values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}{kind}", *values)


class SampleSource:
    """What the agent itself measured; lost with the agent, and bounded when metrics is away."""

    def __init__(self, writer_id: str, rank: int) -> None:
        self.writer_id = writer_id
        self._rank = rank
        self._first_seq = 0
        self._rows: deque[tuple[tuple[str, ...], int, int, tuple[float, ...]]] = deque()

    def add(self, values: Iterable[tuple[str, float]], time_ns: int, step: int) -> None:
        """Adds a row; when metrics was away for too long, new ones are dropped, because numbers may have no holes."""
        if len(self._rows) < MAX_SAMPLES:
            names, numbers = zip(*values, strict=True)
            self._rows.append((names, step, time_ns, numbers))

    def batch(self, seq: int) -> metrics_pb2.AppendRequest | None:
        begin = seq - self._first_seq
        chosen = list(islice(self._rows, begin, begin + SAMPLES_PER_BATCH))
        if not chosen:
            return None
        places: dict[tuple[str, ...], list[int]] = {}
        for place, (names, *_) in enumerate(chosen):
            places.setdefault(names, []).append(place)
        rows = metrics_pb2.Rows(rank=self._rank, count=len(chosen))
        for names, numbers in places.items():
            steps, times, values = zip(*(chosen[number][1:] for number in numbers), strict=True)
            columns = [value for column in zip(*values, strict=True) for value in column]
            rows.blocks.add(
                names=names,
                row=_pack("I", numbers),
                step=_pack("q", steps),
                time_ns=_pack("q", times),
                value=_pack("d", columns),
            )
        return metrics_pb2.AppendRequest(first_seq=seq, rows=rows)

    def acknowledge(self, seq: int) -> None:
        while self._rows and self._first_seq < seq:
            self._rows.popleft()
            self._first_seq += 1
