"""Saving what can be saved of a damaged run, and saying what was lost.

Whatever matches its checksums is kept. A file that has something else is replaced by one with the rest; the damaged one
is put aside, under a name that begins with "damaged-", and never removed. A run's writers go on behind the last record
that is left of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from servicekit.disk import sync_folder

from trainyard_metrics.domain import batches
from trainyard_metrics.domain.lines import in_order
from trainyard_metrics.storage import manifest as manifests
from trainyard_metrics.storage.checking import column_groups
from trainyard_metrics.storage.columnfiles import read_lines, read_points
from trainyard_metrics.storage.files import (
    DAMAGED,
    MANIFEST,
    TEMPORARY,
    Damaged,
    columns_range,
    is_columns,
    repaired_name,
    replace_durably,
    segment_name,
    segment_number,
)
from trainyard_metrics.storage.frames import MAGIC, check_frames, frame_of, salvage, unpack
from trainyard_metrics.storage.manifest import ColumnFile, Manifest


@dataclass(frozen=True, slots=True)
class Repaired:
    """A file that was damaged.

    Attributes:
        what: what was wrong with it.
        lost: what cannot be had back, in words.
    """

    path: Path
    what: str
    lost: str


def repair(folder: Path) -> list[Repaired]:
    """Repairs a run that nobody has open. Blocks. Cut short, it can be done again.

    Raises:
        OSError
    """
    done: list[Repaired] = []
    when = time.time_ns()
    try:
        manifest = manifests.load(folder)
    except Damaged as damage:
        _put_aside(damage.path, when)
        manifest = _found_manifest(folder)
        done.append(Repaired(damage.path, damage.what, "nothing: it was made anew of the files that are there"))
    else:
        if manifest == Manifest() and _needs_manifest(folder):
            manifest = _found_manifest(folder)
            lost = "nothing: it was made anew of the files that are there"
            done.append(Repaired(folder / MANIFEST, "it is missing", lost))
    manifest = _repair_columns(folder, manifest, when, done, made_anew=bool(done))
    _repair_segments(folder, manifest, when, done)
    return done


def _needs_manifest(folder: Path) -> bool:
    return bool(_columns(folder)) and not (folder / segment_name(0)).exists()


def _columns(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if is_columns(path.name))


def _segments(folder: Path) -> list[int]:
    return sorted(number for path in folder.iterdir() if (number := segment_number(path.name)) is not None)


def _put_aside(path: Path, when: int) -> None:
    if path.exists():
        os.link(path, path.with_name(f"{DAMAGED}{when}-{path.name}"))
        sync_folder(path.parent)


def _repair_columns(folder: Path, manifest: Manifest, when: int, done: list[Repaired], *, made_anew: bool) -> Manifest:
    repaired = manifest
    replaced = []
    for file in manifest.files:
        groups = list(column_groups(folder / file.name, file))
        problems = [damage.what for _, damage in groups if damage is not None]
        good = [group for group, damage in groups if damage is None]
        if not problems:
            continue
        _put_aside(folder / file.name, when)
        saved = _rewrite(folder, file, good, when) if good else None
        repaired = repaired.exchange({file.name}, (saved,) if saved else ())
        replaced.append(folder / file.name)
        kept = saved.rows if saved else 0
        done.append(Repaired(folder / file.name, "; ".join(problems), _lost_columns(file, file.rows - kept)))
    if repaired != manifest or made_anew:
        manifests.store(folder, repaired)
    for path in replaced:
        path.unlink(missing_ok=True)
    return repaired


def _rewrite(folder: Path, file: ColumnFile, good: list[int], when: int) -> ColumnFile | None:
    from trainyard_metrics.storage.columnwriter import ColumnWriter, groups_of_lines

    name = repaired_name(file.name, when)
    with ColumnWriter(folder / (name + TEMPORARY), name, file.kind, file.first, file.last, file.level) as writer:
        if file.kind == "points":
            for group in read_points(folder / file.name, file, groups=good):
                writer.write(group)
        else:
            for lines in groups_of_lines(in_order([read_lines(folder / file.name, file, groups=good)])):
                writer.write(lines)
    if writer.written is not None:
        (folder / (name + TEMPORARY)).replace(folder / name)
        sync_folder(folder)
    return writer.written


def _lost_columns(file: ColumnFile, count: int) -> str:
    return f"{count:,} {file.kind} of {_ranges(file.writers.items())}"


def _ranges(writers: Iterable[tuple[str, tuple[int, int]]], most: int = 10) -> str:
    described = [f"{writer} (between records {first} and {last})" for writer, (first, last) in sorted(writers)]
    more = f" and {len(described) - most} more writers" if len(described) > most else ""
    return ", ".join(described[:most]) + more


def _repair_segments(folder: Path, manifest: Manifest, when: int, done: list[Repaired]) -> None:
    numbers = _segments(folder)
    if not numbers and not manifest.files:
        return
    positions = dict(manifest.positions)
    for number in range(manifest.first_segment, max([manifest.first_segment, *numbers]) + 1):
        path = folder / segment_name(number)
        end = path.stat().st_size if path.exists() else 0
        problems = list(check_frames(path, end)) if end > len(MAGIC) or not path.exists() else []
        payloads = list(salvage(path)) if end else []
        gaps = list(_gaps(payloads, positions))
        if not problems:
            continue
        _put_aside(path, when)
        replace_durably(path, b"".join((MAGIC, *map(frame_of, payloads))))
        lost = ", ".join(gaps) or "what was written last, if anything: its writers know"
        done.append(Repaired(path, "; ".join(f"byte {found.offset}: {found.what}" for found in problems), lost))


def _gaps(payloads: Iterable[bytes], positions: dict[str, int]) -> Iterator[str]:
    """Records that lack between those that are there; moves `positions` on."""
    for payload in payloads:
        for request in unpack(payload):
            expected = positions.get(request.writer_id, 0)
            if request.first_seq > expected:
                yield f"records {expected} to {request.first_seq - 1} of {request.writer_id}"
            positions[request.writer_id] = request.first_seq + batches.count(request)


def _found_manifest(folder: Path) -> Manifest:
    """A manifest of the column files that are there: the largest, as far as segments do not have the same records."""
    from trainyard_metrics.storage.columnwriter import describe, writers_of

    ranges = {name: columns_range(name) for name in _columns(folder)}
    inside = {number for _, first, last in ranges.values() for number in range(first + 1, last + 1)}
    last = max((last for _, _, last in ranges.values()), default=-1)
    begin = next((number for number in _segments(folder) if number not in inside), last + 1)
    chosen = [name for name, mine in ranges.items() if mine[1] < begin and not _within_another(mine, ranges.values())]
    files = tuple(
        sorted(
            (describe(folder / name, writers_of(folder / name)) for name in chosen),
            key=lambda file: (file.kind, file.first),
        )
    )
    manifest = replace(Manifest(), first_segment=begin, files=files)
    return _with_facts(folder, manifest)


def _within_another(mine: tuple[str, int, int], ranges: Iterable[tuple[str, int, int]]) -> bool:
    kind, first, last = mine
    return any(other[0] == kind and other != mine and other[1] <= first and last <= other[2] for other in ranges)


def _with_facts(folder: Path, manifest: Manifest) -> Manifest:
    positions: dict[str, int] = {}
    times: dict[str, int] = {}
    names: set[str] = set()
    for file in manifest.files:
        for writer, (_, last) in file.writers.items():
            positions[writer] = max(positions.get(writer, 0), last + 1)
        if file.kind == "points":
            names.update(name for group in read_points(folder / file.name, file) for name in group.names)
        else:
            for (time_ns, writer, _), _ in in_order([read_lines(folder / file.name, file)]):
                times[writer] = max(times.get(writer, time_ns), time_ns)
    return replace(manifest, positions=positions, line_times=times, names=tuple(sorted(names)))
