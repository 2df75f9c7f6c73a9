"""Rows in files: one JSON object per line, or a table."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from trainkit.errors import InvalidSetup
from trainkit.trackers.background import Background, Row
from trainkit.trackers.base import Outcome, RunContext


class _File(Background):
    """A file that rows are appended to. Rows of a life that was killed are cut off when a run is resumed."""

    default: str

    def __init__(self, path: str | Path | None = None, *, capacity: int = 100_000, interval_s: float = 0.5) -> None:
        super().__init__(capacity=capacity, interval_s=interval_s)
        self.path = Path(path) if path is not None else None
        self._file: IO[str] | None = None

    def _open(self, context: RunContext) -> None:
        if self.path is None:
            if context.folder is None:
                name = type(self).__name__
                raise InvalidSetup(
                    f"{name}: the run has no folder, because it makes no checkpoints: give {name}(path=...)"
                )
            self.path = context.folder / self.default
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._begin(self._kept(self.path, context.resumed_step))
        self._file = self.path.open("a", encoding="utf-8", newline="")

    def _kept(self, path: Path, resumed_step: int | None) -> list[dict[str, Any]]:
        """The rows of earlier lives that count."""
        if resumed_step is None or not path.exists():
            return []
        return [row for row in self._rows(path) if int(row["step"]) <= resumed_step]

    def _begin(self, kept: Iterable[dict[str, Any]]) -> None:
        """Replaces the file by one that holds `kept`."""
        assert self.path is not None
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with open(partial, "w", encoding="utf-8", newline="") as file:
            self._append(file, kept)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)

    def _write(self, rows: Sequence[Row]) -> None:
        assert self._file is not None
        plain = [{"step": row.step, "time": round(row.time, 3), **row.values} for row in rows]
        self._append(self._file, plain)
        self._file.flush()

    def _close(self, outcome: Outcome) -> None:
        if self._file is not None:
            self._file.close()

    def _rows(self, path: Path) -> Iterable[dict[str, Any]]:
        raise NotImplementedError

    def _append(self, file: IO[str], rows: Iterable[dict[str, Any]]) -> None:
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

    def _append(self, file: IO[str], rows: Iterable[dict[str, Any]]) -> None:
        file.write("".join(json.dumps({key: _finite(value) for key, value in row.items()}) + "\n" for row in rows))


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
        assert self._file is not None and self.path is not None
        if any(key not in self._columns for row in rows for key in row.values):
            new = [{"step": 0, **dict.fromkeys(row.values, "")} for row in rows]
            self._file.close()
            self._columns = list(dict.fromkeys([*self._columns, *(key for row in new for key in row)]))
            header = dict(zip(self._columns, self._columns, strict=True))
            _File._begin(self, [header, *self._rows(self.path)])
            self._file = self.path.open("a", encoding="utf-8", newline="")
        super()._write(rows)

    def _rows(self, path: Path) -> Iterable[dict[str, Any]]:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        whole = path.read_text("utf-8").endswith("\n")
        return rows if whole else rows[:-1]

    def _append(self, file: IO[str], rows: Iterable[dict[str, Any]]) -> None:
        csv.DictWriter(file, self._columns, restval="", lineterminator="\n").writerows(rows)
