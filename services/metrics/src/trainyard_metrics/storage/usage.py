"""What runs take on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from servicekit import tree

from trainyard_metrics.storage.files import is_columns, segment_number


@dataclass
class Size:
    """Files of one kind."""

    bytes: int = 0
    files: int = 0


@dataclass
class Usage:
    """What is below a folder of runs.

    Attributes:
        journals: segments.
        columns: column files.
        other: manifests; unfinished writes and damaged files that were put aside.
    """

    runs: int = 0
    journals: Size = field(default_factory=Size)
    columns: Size = field(default_factory=Size)
    other: Size = field(default_factory=Size)


def usage(root: Path) -> Usage:
    """Counts. Blocks; runs may change meanwhile."""
    total = Usage()
    for run_id in run_ids(root):
        total.runs += 1
        for name, size in _sizes(root / run_id):
            kind = total.other
            if segment_number(name) is not None:
                kind = total.journals
            elif is_columns(name):
                kind = total.columns
            kind.files += 1
            kind.bytes += size
    return total


@dataclass
class RunBytes:
    """What runs take on disk, in blocks that are theirs, by what is in the files."""

    logs: int = 0
    points: int = 0
    journals: int = 0
    other: int = 0


def bytes_of(root: Path, run_ids: Sequence[str]) -> RunBytes:
    """Measures the files of these runs. Blocks; runs may change meanwhile."""
    total = RunBytes()
    for run_id in run_ids:
        for name, size in tree.files(root / run_id):
            kind = "journals" if segment_number(name) is not None else "other"
            if is_columns(name):
                kind = "logs" if name.startswith("lines-") else "points"
            setattr(total, kind, getattr(total, kind) + size)
    return total


def run_ids(root: Path) -> list[str]:
    """The runs that have files, in the order of their ids."""
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def journal_bytes(folder: Path) -> tuple[int, int]:
    """How many journal segments a run has, and their size."""
    sizes = [size for name, size in _sizes(folder) if segment_number(name) is not None]
    return len(sizes), sum(sizes)


def _sizes(folder: Path) -> list[tuple[str, int]]:
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                found.append((entry.name, entry.stat(follow_symlinks=False).st_size))
    except FileNotFoundError:
        pass  # it was removed meanwhile
    return found
