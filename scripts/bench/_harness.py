"""What every benchmark shares: alternating runs, medians, a table, and one JSON line last.

The JSON line is `{"name", "ours", "peer", "peer_name", "unit", "ratio", "bar", "ok", "bars"}`. A benchmark with several
bars lists each of them in `bars` and shows the tightest one, by how much of its limit is used, in the fields before;
`ok` is true when every bar holds. `ratio` is ours / peer, and `bar` is the limit on `ours`, in `unit`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from rich.console import Console
from rich.table import Table

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One measured number, its peer's, and the limit it has to keep."""

    name: str
    ours: float
    peer: float
    peer_name: str
    unit: str
    bar: float
    higher_is_better: bool = False

    @property
    def ok(self) -> bool:
        return self.ours >= self.bar if self.higher_is_better else self.ours <= self.bar

    @property
    def used(self) -> float:
        """Share of the limit that is used: above 1 the bar is missed."""
        return self.bar / self.ours if self.higher_is_better else self.ours / self.bar

    def to_json(self) -> dict[str, object]:
        fields = asdict(self)
        del fields["higher_is_better"]
        rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}
        return rounded | {"ratio": round(self.ours / self.peer, 4), "ok": self.ok}


def interleave(cases: Mapping[str, Callable[[], T]], rounds: int, warmups: int = 1) -> dict[str, list[T]]:
    """Runs every case once a round, every other round backwards, so that drift of the machine hits all alike.

    Args:
        cases: what to run, by name.
        rounds: results kept per case.
        warmups: rounds before those, whose results are thrown away.
    """
    results: dict[str, list[T]] = {name: [] for name in cases}
    for number in range(-warmups, rounds):
        order = list(cases) if number % 2 == 0 else list(cases)[::-1]
        for name in order:
            progress(f"{'warm-up' if number < 0 else f'round {number + 1}/{rounds}'}: {name}")
            result = cases[name]()
            if number >= 0:
                results[name].append(result)
    progress("")
    return results


def progress(text: str) -> None:
    """One line that replaces itself, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; every column but the first is of numbers."""
    view = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        view.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        view.add_row(*row)
    Console(width=140).print(view)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, smallest and largest."""
    return statistics.median(values), min(values), max(values)


def conclude(name: str, bars: Sequence[Bar]) -> int:
    """Prints the bars and, last, the JSON line. Returns the benchmark's exit code."""
    rows = [
        (bar.name, f"{bar.ours:.4g}", f"{bar.bar:.4g}", f"{bar.peer:.4g} ({bar.peer_name})", bar.unit, _verdict(bar))
        for bar in bars
    ]
    table("bars", ("bar", "ours", "limit", "peer", "unit", ""), rows)
    tightest = max(bars, key=lambda bar: bar.used)
    line = tightest.to_json() | {"name": name, "ok": all(bar.ok for bar in bars), "bars": [b.to_json() for b in bars]}
    print(json.dumps(line))
    return 0 if line["ok"] else 1


def _verdict(bar: Bar) -> str:
    return "ok" if bar.ok else "MISSED"


def clean_environment(**changes: str) -> dict[str, str]:
    """This process's environment as a user's would be: modules are compiled once and kept."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | changes
