"""The segments of one writing process: begun when they are needed, one after the other."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from trainyard.home import process_start_time
from trainyard.tracker import offline
from trainyard.tracker.records import (
    SHAPE,
    RowShape,
    SegmentFull,
    SegmentWriter,
    json_record,
    segment_path,
)

FOLDER_VARIABLE = "TRAINYARD_TRACKER_DIR"
MAX_NAME = 256
MAX_NAMES = 10_000
"""In one row: as many series as metrics keeps of one run."""
# Between two tries to make a segment, when the disk is full or the folder cannot be written.
RETRY_S = 1.0


class Unavailable(Exception):
    """There is no room to write to now; later there may be."""


class Log:
    """One writer. Not for several threads at once.

    Attributes:
        writer_id: new for every log.
    """

    def __init__(self) -> None:
        self.writer_id = uuid.uuid4()
        self._segment: SegmentWriter | None = None
        self._dropped = 0
        self._retry_at_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether there is a segment to write to."""
        return self._segment is not None

    def row(self, names: tuple[str, ...], step: int, time_ns: int, values: Iterable[float]) -> None:
        """Writes one row.

        Raises:
            Unavailable: there is no room; the row is not there.
            TooLarge, ValueError: these names cannot be written.
            struct.error, TypeError: a value or the step is no number that fits.
        """
        segment = self._segment or self._roll()
        shape = segment.shapes.get(names)
        if shape is None:
            segment, shape = self._declare(names)
        try:
            segment.append(shape.pack(shape.size, shape.number, step, time_ns, *values))
        except SegmentFull:
            self._roll()
            self.row(names, step, time_ns, values)

    def record(self, record: bytes) -> None:
        """Writes one record that is no row, given without its CRC.

        Raises:
            Unavailable: there is no room.
        """
        self._with_room(len(record) + 4).append(record)

    def drop(self) -> None:
        """Counts a row that could not be written."""
        self._dropped += 1
        if self._segment is not None:
            self._segment.count_dropped(self._dropped)

    def close(self) -> None:
        """Lets go of the file; what is in it stays."""
        if self._segment is not None:
            self._segment.close()

    def _declare(self, names: tuple[str, ...]) -> tuple[SegmentWriter, RowShape]:
        for name in names:
            if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
                raise ValueError(f"{name!r:.80} is no name: use a string of 1 to {MAX_NAME} characters")
        if not names:
            raise ValueError("nothing to log")
        if len(names) > MAX_NAMES:
            raise ValueError(f"{len(names):,} values at once: a row has at most {MAX_NAMES:,}")
        # With room for a row too: both go into the same segment.
        segment = self._with_room(len(json_record(SHAPE, names)) + 4 + RowShape(0, len(names)).size)
        shape = RowShape(len(segment.shapes), len(names))
        segment.append(json_record(SHAPE, names, shape=shape.number))
        segment.shapes[names] = shape
        return segment, shape

    def _with_room(self, size: int) -> SegmentWriter:
        if self._segment is None or self._segment.room < size:
            return self._roll(size)
        return self._segment

    def _roll(self, room: int = 0) -> SegmentWriter:
        """Goes on in another segment, with room for at least so many bytes."""
        full = self._segment
        if full is None or full.published:
            self._segment = self._following(full, room)
            if full is not None:
                full.close()
        # Else an exception came between the two; nothing was lost.
        assert self._segment is not None
        self._segment.publish()
        self._segment.count_dropped(self._dropped)
        return self._segment

    def _following(self, full: SegmentWriter | None, room: int) -> SegmentWriter:
        if time.monotonic() < self._retry_at_s:
            raise Unavailable("nothing is recorded: see the first warning")
        try:
            folder = _folder()
            index = 0 if full is None else full.index + 1
            return SegmentWriter(
                segment_path(folder, str(self.writer_id), index),
                writer_id=self.writer_id.bytes,
                rank=_rank(),
                start_time=process_start_time(os.getpid()) or 0,
                created_ns=time.time_ns(),
                index=index,
                first_row=0 if full is None else full.next_row,
                room=room,
            )
        except OSError as error:
            self._retry_at_s = time.monotonic() + RETRY_S
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Unavailable("the disk is full: what is logged is dropped until there is room again") from error
            raise Unavailable(f"nothing is recorded: {error}") from error


def _folder() -> Path:
    configured = os.environ.get(FOLDER_VARIABLE)
    if not configured:
        return offline.begin()
    folder = Path(configured)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _rank() -> int:
    for name in ("RANK", "TRAINYARD_RANK"):
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return 0
