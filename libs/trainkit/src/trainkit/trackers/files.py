"""Rows in files: one JSON object per line, or a table."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainkit.errors import InvalidSetup
from trainkit.trackers.background import Background, Row
from trainkit.trackers.base import Outcome, RunContext


class _File(Background):
    """A file that rows are appended to. Rows that are not in the checkpoint are cut off when a run resumes from it."""

    default: str

    def __init__(self, path: str | Path | None = None, *, capacity: int = 100_000, interval_s: float = 0.5) -> None:
        super().__init__(capacity=capacity, interval_s=interval_s)
        self._given = Path(path) if path is not None else None
        self.path = self._given
        self._file: io.FileIO | None = None
        self._size = 0

    @property
    def destination(self) -> str | None:
        return None if self.path is None else str(self.path.resolve())

    def _open(self, context: RunContext) -> None:
        if self._given is None and context.folder is None:
            name = type(self).__name__
            raise InvalidSetup(f"{name}: the run has no folder, because it makes no checkpoints: give {name}(path=...)")
        self.path = self._given or (context.folder or Path()) / self.default
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._begin(self._kept(self.path, context))
        except OSError as error:
            raise InvalidSetup(
                f"{type(self).__name__}: {self.path} cannot be written: {error.strerror}; give another path"
            ) from error

    def _kept(self, path: Path, context: RunContext) -> list[dict[str, Any]]:
        """The stored rows that belong to the resumed run."""
        if context.resumed_step is None or not path.exists():
            return []
        return [row for row in self._rows(path) if context.keeps(int(row["step"]), float(row["time"]))]

    def _begin(self, kept: Iterable[dict[str, Any]]) -> None:
        """Replaces the file by one that holds `kept`, and opens it."""
        assert self.path is not None
        text = self._text(kept).encode()
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with open(partial, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)
        self._close("stopped")
        self._file, self._size = open(self.path, "ab", buffering=0), len(text)  # noqa: SIM115 - open until the end

    def _write(self, rows: Sequence[Row]) -> None:
        assert self._file is not None
        text = self._text([{"step": row.step, "time": round(row.time, 3), **row.values} for row in rows]).encode()
        self._file.truncate(self._size)  # without the part that a try before wrote until the disk was full
        left = memoryview(text)
        while left:
            left = left[self._file.write(left) :]
        self._size += len(text)

    def _close(self, outcome: Outcome) -> None:
        if self._file is not None:
            self._file.close()

    def _rows(self, path: Path) -> Iterable[dict[str, Any]]:
        raise NotImplementedError

    def _text(self, rows: Iterable[dict[str, Any]]) -> str:
        raise NotImplementedError


class JsonLines(_File):
    """One JSON object per row: `{"step": 20, "time": 1790000000.123, "train/loss": 0.5}`.

    What JSON has no number for is a text: `"nan"`, `"inf"`, `"-inf"`.

    Args:
        path: of the file; default `metrics.jsonl` in the run's folder.
        capacity: rows that wait at most.
        interval_s: how often they are written, in seconds.
    """

    default = "metrics.jsonl"

    def _rows(self, path: Path) -> Iterable[dict[str, Any]]:
        for line in path.read_text("utf-8").splitlines(keepends=True):
            if line.endswith("\n"):  # a line that a kill cut off has none
                yield json.loads(line)

    def _text(self, rows: Iterable[dict[str, Any]]) -> str:
        return "".join(json.dumps({key: _finite(value) for key, value in row.items()}) + "\n" for row in rows)


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Csv(_File):
    """A table with a column for every name; a name that comes later gets a new column.

    Args:
        path: of the file; default `metrics.csv` in the run's folder.
        capacity: rows that wait at most.
        interval_s: how often they are written, in seconds.
    """

    default = "metrics.csv"

    def __init__(self, path: str | Path | None = None, *, capacity: int = 100_000, interval_s: float = 0.5) -> None:
        super().__init__(path, capacity=capacity, interval_s=interval_s)
        self._columns: list[str] = []

    def _begin(self, kept: Iterable[dict[str, Any]]) -> None:
        kept = list(kept)
        self._columns = list(dict.fromkeys(["step", "time", *(key for row in kept for key in row)]))
        super()._begin([dict(zip(self._columns, self._columns, strict=True)), *kept])

    def _write(self, rows: Sequence[Row]) -> None:
        if any(key not in self._columns for row in rows for key in row.values):
            self._widen([*self._columns, *(key for row in rows for key in row.values)])
        super()._write(rows)

    def _widen(self, columns: Iterable[str]) -> None:
        assert self._file is not None and self.path is not None
        self._file.truncate(self._size)
        rows, before = list(self._rows(self.path)), self._columns
        self._columns = list(dict.fromkeys(columns))
        try:
            super()._begin([dict(zip(self._columns, self._columns, strict=True)), *rows])
        except OSError:
            self._columns = before  # the file still has these
            raise

    def _rows(self, path: Path) -> Iterable[dict[str, Any]]:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        whole = path.read_text("utf-8").endswith("\n")
        return rows if whole else rows[:-1]

    def _text(self, rows: Iterable[dict[str, Any]]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, restval="", lineterminator="\n").writerows(rows)
        return text.getvalue()
