"""The one log of this process: opened at the first call, opened anew in a forked child."""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainyard.tracker.records import (
    END_KIND,
    FACTS_KIND,
    POINTS,
    POINTS_KIND,
    PROGRESS,
    PROGRESS_KIND,
    SHAPE_KIND,
    SUFFIX,
    LogFull,
    LogWriter,
)

MAX_SHAPES = 10_000
MAX_NAME = 256


class _Shape:
    """A set of names that are logged together: known names cost one lookup and one packing."""

    __slots__ = ("number", "pack")

    def __init__(self, number: int, names: int) -> None:
        self.number = number
        self.pack: Callable[..., bytes] = struct.Struct(f"<{names}d").pack


class Session:
    """What the functions of `trainyard.tracker` do. For any number of threads."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._reset()
        # A child has its parent's memory but must not write into its parent's log.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._writer: LogWriter | None = None
        self._broken = False
        self._shapes: dict[tuple[str, ...], _Shape] = {}
        self._next_step = 0

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        try:
            names = tuple(metrics)
            values = [*map(float, metrics.values())]
            with self._lock:
                number = self._next_step if step is None else int(step)
                shape = self._shapes.get(names) or self._shape(names)
                payload = POINTS.pack(shape.number, number, time.time_ns()) + shape.pack(*values)
                self._open().append(POINTS_KIND, payload)
                self._next_step = number + 1
        except Exception as error:
            self._log_what_can_be(metrics, step, error)

    def _log_what_can_be(self, metrics: Any, step: Any, error: Exception) -> None:
        """The slow way, after something went wrong: drops the values that are no numbers and keeps the others."""
        if isinstance(error, LogFull | OSError | _Unavailable):
            return self._warn(str(error))
        try:
            good = {name: value for name, value in dict(metrics).items() if self._usable(name, value)}
            number = None if step is None else int(step)
        except Exception as unusable:
            return self._warn(f"log({type(metrics).__name__}, step={step!r}) was dropped: {unusable}")
        if good and len(good) < len(metrics):
            self.log(good, number)
        elif good:
            self._warn(f"log of {', '.join(good)} was dropped: {error}")

    def _usable(self, name: Any, value: Any) -> bool:
        try:
            float(value)
        except Exception as error:
            self._warn(f"the value of {name!r} was dropped, float() does not take it: {error}")
            return False
        if isinstance(name, str) and 0 < len(name) <= MAX_NAME:
            return True
        self._warn(f"the value of {name!r:.80} was dropped: a name is a string of 1 to {MAX_NAME} characters")
        return False

    def _shape(self, names: tuple[str, ...]) -> _Shape:
        for name in names:
            if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
                raise ValueError(name)
        if not names:
            raise ValueError("nothing to log")
        if len(self._shapes) >= MAX_SHAPES:
            raise _Unavailable(
                f"log of {', '.join(names)[:200]} was dropped: more than {MAX_SHAPES:,} different sets of names; "
                "put what varies into the step or the value, not into the name"
            )
        self._open().append(SHAPE_KIND, json.dumps(names).encode())
        shape = self._shapes[names] = _Shape(len(self._shapes), len(names))
        return shape

    def progress(self, step: int, total: int | None = None) -> None:
        self._append(PROGRESS_KIND, lambda: PROGRESS.pack(int(step), int(total or 0), time.time_ns()))

    def facts(self, kind: str, value: Any) -> None:
        self._append(FACTS_KIND, lambda: json.dumps({kind: value}, default=str).encode())

    def finish(self) -> None:
        with self._lock:
            if self._writer is not None:
                self._writer.append(END_KIND, b"")
                self._writer.close()
                self._writer = None
                self._shapes = {}

    def _append(self, kind: int, payload: Callable[[], bytes]) -> None:
        try:
            with self._lock:
                self._open().append(kind, payload())
        except Exception as error:
            self._warn(f"a record was dropped: {error}")

    def _open(self) -> LogWriter:
        if self._writer is None:
            if self._broken:
                raise _Unavailable("nothing is recorded: see the first warning")
            try:
                self._writer = _new_log()
            except Exception as error:
                self._broken = True
                raise _Unavailable(f"nothing is recorded: {error}") from error
        return self._writer

    def _warn(self, text: str) -> None:
        """Once for every text, and in one write, so that ranks do not mix."""
        if text not in self._warned and len(self._warned) < 100:
            self._warned.add(text)
            try:
                sys.stderr.write(f"trainyard.tracker: {text}\n")
            except Exception:  # a closed stderr is no reason to end a training either
                return


class _Unavailable(Exception):
    """There is no log to write to."""


def _new_log() -> LogWriter:
    folder = os.environ.get("TRAINYARD_TRACKER_DIR")
    if folder:
        directory = Path(folder)
    else:
        # Imported only outside of a job: inside, the fewer modules the better.
        from trainyard.tracker.offline import begin

        directory = begin()
    directory.mkdir(parents=True, exist_ok=True)
    writer_id = uuid.uuid4()
    return LogWriter(directory / f"{writer_id}{SUFFIX}", writer_id.bytes, _rank(), time.time_ns())


def _rank() -> int:
    for name in ("RANK", "TRAINYARD_RANK"):
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return 0
