"""Comparing everything that is stored of a run with its checksums."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainyard_metrics.storage.columnfiles import Verified
from trainyard_metrics.storage.files import Damaged, HeldFile
from trainyard_metrics.storage.frames import check_frames
from trainyard_metrics.storage.manifest import ColumnFile
from trainyard_metrics.storage.snapshot import ColumnPart, Snapshot


def check(snapshot: Snapshot) -> Iterator[Damaged]:
    """Everything that is not what was written; ends when the run is removed. Blocks; reads as far as it is asked to."""
    for part in snapshot.files:
        yield from _while_there(part.held, _damaged_groups(part))
    for segment in snapshot.segments:
        if segment.size:
            yield from _while_there(segment.held, check_frames(segment.held.path, segment.size))


def _while_there(held: HeldFile, found: Iterator[Damaged]) -> Iterator[Damaged]:
    return (damage for damage in found if held.path.parent.exists())


def _damaged_groups(part: ColumnPart) -> Iterator[Damaged]:
    return (damage for _, damage in column_groups(part.held.path, part.file) if damage is not None)


def column_groups(path: Path, file: ColumnFile) -> Iterator[tuple[int, Damaged | None]]:
    """Every row group of a column file and what is wrong with it; (-1, what) alone when none can be read."""
    try:
        verified = Verified(path, file)
    except Damaged as damage:
        yield -1, damage
        return
    except FileNotFoundError:
        yield -1, Damaged(path, 0, "it is missing")
        return
    with verified:
        for group in range(len(file.groups)):
            try:
                verified.load(group)
            except Damaged as damage:
                yield group, damage
            else:
                yield group, None
