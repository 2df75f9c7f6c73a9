"""Comparing everything that is stored of a run with its checksums."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard_metrics.storage.columnfiles import Verified
from trainyard_metrics.storage.files import Damaged, HeldFile
from trainyard_metrics.storage.frames import check_frames
from trainyard_metrics.storage.snapshot import ColumnPart, Snapshot


def check(snapshot: Snapshot) -> Iterator[Damaged]:
    """Everything that is not what was written; ends when the run is removed. Blocks; reads as far as it is asked to."""
    for part in snapshot.files:
        yield from _while_there(part.held, _check_columns(part))
    for segment in snapshot.segments:
        if segment.size:
            yield from _while_there(segment.held, check_frames(segment.held.path, segment.size))


def _while_there(held: HeldFile, found: Iterator[Damaged]) -> Iterator[Damaged]:
    return (damage for damage in found if held.path.parent.exists())


def _check_columns(part: ColumnPart) -> Iterator[Damaged]:
    try:
        verified = Verified(part.held.path, part.file)
    except Damaged as damage:
        yield damage
        return
    except FileNotFoundError:
        yield Damaged(part.held.path, 0, "it is missing")
        return
    with verified:
        for group in range(len(part.file.groups)):
            try:
                verified.load(group)
            except Damaged as damage:
                yield damage
