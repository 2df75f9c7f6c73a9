"""Rows as TensorBoard's event files."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.errors import InvalidSetup
from trainkit.extras import require
from trainkit.trackers.background import Background, Row
from trainkit.trackers.base import Outcome, RunContext
from trainkit.trackers.plain import flat

_SUFFIX = ".trainkit"
_LENGTH, _CRC_BYTES = struct.Struct("<Q"), 4


class TensorBoard(Background):
    """Scalars for TensorBoard. What is not in the checkpoint is cut off its files when a run resumes from it.

    A viewer that has read it already hides what is beyond the checkpoint's step. A run that starts from its first step
    replaces the files in its own folder; in a `folder` that was given, viewers hide what was there before.

    Args:
        folder: of the event files; default `tensorboard` in the run's folder.
        capacity: rows that wait at most.
        interval_s: how often they are written, in seconds.

    Raises:
        MissingExtra: when the run begins and `tensorboard` is not installed.
    """

    def __init__(self, folder: str | Path | None = None, *, capacity: int = 100_000, interval_s: float = 0.5) -> None:
        super().__init__(capacity=capacity, interval_s=interval_s)
        self.folder = Path(folder) if folder is not None else None
        self._writer: Any = None
        self._place: Path | None = None

    @property
    def destination(self) -> str | None:
        return None if self._place is None else str(self._place.resolve())

    def _open(self, context: RunContext) -> None:
        require("tensorboard", "the TensorBoard tracker")
        from torch.utils.tensorboard import SummaryWriter

        if self.folder is None and context.folder is None:
            raise InvalidSetup(
                "TensorBoard: the run has no folder, because it makes no checkpoints: give TensorBoard(folder=...)"
            )
        self._place = folder = self.folder or (context.folder or Path()) / "tensorboard"
        purge = None if context.resumed_step is None else context.resumed_step + 1
        if context.resumed_time is not None:
            _cut_off(folder, context.resumed_time)
        elif context.resumed_step is None and self.folder is None:  # what was killed before its first checkpoint
            _cut_off(folder, -math.inf)
        elif context.resumed_step is None:  # a user's folder can hold the files of other runs
            purge = 0
        try:
            self._writer = SummaryWriter(str(folder), purge_step=purge, filename_suffix=_SUFFIX)
        except OSError as error:
            raise InvalidSetup(
                f"TensorBoard: {folder} cannot be written: {error.strerror}; give another folder"
            ) from error
        lines = [f"| {name} | {value} |" for name, value in flat(context.parameters).items()]
        if lines and context.resumed_step is None:
            self._writer.add_text("parameters", "\n".join(["| name | value |", "|---|---|", *lines]))

    def _write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, row.step, walltime=row.time)
        self._writer.flush()

    def _close(self, outcome: Outcome) -> None:
        self._writer.close()


def _cut_off(folder: Path, time: float) -> None:
    """Removes what this tracker wrote to a folder after a time. Files of other writers stay as they are."""
    for path in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
        if (end := _end_of(path, time)) is not None:
            os.truncate(path, end) if end else path.unlink()


def _end_of(path: Path, time: float) -> int | None:
    """Where the first event after a time begins, or one that a kill cut off; None when there is none."""
    event_pb2 = require("tensorboard.compat.proto.event_pb2", "the TensorBoard tracker")

    with open(path, "rb") as file:
        while head := file.read(_LENGTH.size + _CRC_BYTES):
            begin = file.tell() - len(head)
            if len(head) < _LENGTH.size + _CRC_BYTES:
                return begin
            (length,) = _LENGTH.unpack_from(head)
            body = file.read(length + _CRC_BYTES)
            if len(body) < length + _CRC_BYTES or event_pb2.Event.FromString(body[:length]).wall_time > time:
                return begin
    return None
