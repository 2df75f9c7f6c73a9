"""The folder of one run: opening it after anything that may have happened, appending to it, switching its files.

Everything here blocks. One thread at a time, except that `state` belongs to the event loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from servicekit.disk import sync_folder
from trainyard_protos.v1.metrics_pb2 import AppendRequest

from trainyard_metrics.domain import batches
from trainyard_metrics.storage import manifest as manifests
from trainyard_metrics.storage.files import (
    MANIFEST,
    TEMPORARY,
    Damaged,
    HeldFile,
    hold,
    is_columns,
    segment_name,
    segment_number,
)
from trainyard_metrics.storage.frames import frames
from trainyard_metrics.storage.journal import Journal
from trainyard_metrics.storage.made import Made
from trainyard_metrics.storage.manifest import Manifest
from trainyard_metrics.storage.snapshot import ColumnPart, Offsets, SegmentPart, Snapshot


class Segment:
    """A journal segment and where in it what is.

    Attributes:
        held: its file.
        size: bytes that are durable.
        frames: how many.
        points: how many.
        rows: offsets of frames with rows.
        lines: by writer, offsets of frames with its lines.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.held = hold(folder / segment_name(number))
        self.number = number
        self.size = 0
        self.frames = 0
        self.points = 0
        self.rows: array[int] = array("Q")
        self.lines: dict[str, array[int]] = {}

    def add(self, offset: int, requests: Sequence[AppendRequest]) -> None:
        """Takes note of a stored frame."""
        self.frames += 1
        for request in requests:
            self.points += batches.count_points(request.rows)
            offsets = self.lines.setdefault(request.writer_id, array("Q")) if request.HasField("lines") else self.rows
            if not offsets or offsets[-1] != offset:
                offsets.append(offset)

    def part(self) -> SegmentPart:
        """What is in it by now."""
        lines = {writer: Offsets(offsets) for writer, offsets in self.lines.items()}
        return SegmentPart(self.held, self.size, Offsets(self.rows), lines)


@dataclass
class State:
    """What is durable of a run."""

    manifest: Manifest
    files: dict[str, HeldFile]  # of the manifest, by name
    segments: list[Segment]  # the last one grows
    positions: dict[str, int]  # writer -> first number that is not stored
    line_times: dict[str, int]  # writer -> time of its last line
    names: set[str]  # of series
    torn: int = field(default=0)  # bytes of unfinished writes that opening cut off

    def add(self, segment: Segment, offset: int, requests: Sequence[AppendRequest]) -> None:
        """Takes note of a stored frame."""
        segment.add(offset, requests)
        for request in requests:
            self.positions[request.writer_id] = request.first_seq + batches.count(request)
            if request.HasField("lines"):
                self.line_times[request.writer_id] = request.lines.lines[-1].time_ns
            else:
                self.names.update(name for block in request.rows.blocks for name in block.names)

    def compacted(self, segment: Segment, made: Made) -> Manifest:
        """The manifest with column files in the place of the oldest segment."""
        return replace(
            self.manifest.exchange(set(), tuple(made.files)),
            first_segment=segment.number + 1,
            positions=self.manifest.positions | made.positions,
            line_times=self.manifest.line_times | made.line_times,
            names=tuple(sorted({*self.manifest.names, *made.names})),
        )

    def switched(self, manifest: Manifest) -> None:
        """Takes note of a manifest that is durable. Files it does without go once nobody reads them."""
        kept = {file.name: self.files.pop(file.name, None) for file in manifest.files}
        for held in self.files.values():
            held.supersede()
        while self.segments[0].number < manifest.first_segment:
            self.segments.pop(0).held.supersede()
        folder = self.segments[0].held.path.parent
        self.files = {name: held or hold(folder / name) for name, held in kept.items()}
        self.manifest = manifest

    def snapshot(self, run_id: str) -> Snapshot:
        """What is durable now."""
        files = tuple(ColumnPart(self.files[file.name], file) for file in self.manifest.files)
        segments = tuple(segment.part() for segment in self.segments if segment.frames)
        count = sum(segment.points for segment in self.segments)
        count += sum(file.rows for file in self.manifest.of_kind("points"))
        last_line_ns = max(self.line_times.values(), default=0)
        return Snapshot(run_id, dict(self.positions), last_line_ns, frozenset(self.names), count, files, segments)


class RunFolder:
    """One run's files, open.

    Args:
        read_only: nothing is changed, for another process may write them.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._read_only = read_only
        self._journal: Journal | None = None

    def open(self) -> State:
        """Finds out what is stored; unless it is read-only, removes what a crash left over.

        Raises:
            Damaged: something that was acknowledged is not there, or not what was written.
            OSError
        """
        manifest = manifests.load(self.path)
        found = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        numbers = _live_segments(self.path, manifest, found)
        if not self._read_only:
            self._tidy(manifest, found)
        state = State(
            manifest,
            {file.name: hold(self.path / file.name) for file in manifest.files},
            [],
            dict(manifest.positions),
            dict(manifest.line_times),
            set(manifest.names),
        )
        try:
            for number in numbers:
                self._recover(state, Segment(self.path, number), newest=number == numbers[-1])
        except BaseException:
            self.close()
            raise
        return state

    def append(self, requests: Sequence[AppendRequest]) -> tuple[int, int]:
        """Writes a frame durably; returns its offset, and the size of the segment behind it.

        Raises:
            OSError: nothing of it is there.
        """
        if self._journal is None:
            self._journal = _begun(self.path / segment_name(0))
        return self._journal.append(requests), self._journal.size

    def roll(self, number: int) -> Segment:
        """Begins a new segment.

        Raises:
            OSError: the old one goes on.
        """
        segment = Segment(self.path, number)
        journal = _begun(segment.held.path)
        self.close()
        self._journal = journal
        segment.size = journal.size
        return segment

    def switch(self, manifest: Manifest, made: Made) -> None:
        """Makes new files count, from now on, also after a crash.

        Raises:
            OSError: the old ones count.
        """
        try:
            for file in made.files:
                (self.path / (file.name + made.suffix)).replace(self.path / file.name)
            sync_folder(self.path)
            manifests.store(self.path, manifest)
        except OSError:
            for file in made.files:
                (self.path / file.name).unlink(missing_ok=True)
            raise

    def sweep(self) -> None:
        """Removes what a compaction that failed left over."""
        for leftover in self.path.glob(f"*{TEMPORARY}"):
            leftover.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes what is open."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _recover(self, state: State, segment: Segment, *, newest: bool) -> None:
        if segment.number == 0 and not segment.held.path.exists():
            pass  # a new run: its first frame makes the file
        elif not newest:
            for offset, requests in frames(segment.held.path):
                state.add(segment, offset, requests)
            segment.size = segment.held.path.stat().st_size
        else:
            self._journal = Journal(segment.held.path, read_only=self._read_only)
            for offset, requests in self._journal.recover():
                state.add(segment, offset, requests)
            segment.size = self._journal.size
            state.torn = self._journal.torn
        state.segments.append(segment)

    def _tidy(self, manifest: Manifest, found: set[str]) -> None:
        known = {file.name for file in manifest.files}
        for name in sorted(found):
            number = segment_number(name)
            superseded = number is not None and number < manifest.first_segment
            if superseded or name.endswith(TEMPORARY) or (is_columns(name) and name not in known):
                hold(self.path / name).supersede()


def _begun(path: Path) -> Journal:
    journal = Journal(path)
    try:
        list(journal.recover())
    except BaseException:
        journal.close()
        # Only the newest segment may end in an unfinished write: a file must not make the one before it an old one.
        path.unlink(missing_ok=True)
        raise
    return journal


def _live_segments(folder: Path, manifest: Manifest, found: set[str]) -> range:
    numbers = {number for name in found if (number := segment_number(name)) is not None}
    live = range(manifest.first_segment, max(numbers, default=0) + 1)
    if MANIFEST not in found and not any(map(is_columns, found)) and not numbers:
        return range(1)  # a new run
    missing = [file.name for file in manifest.files if file.name not in found]
    missing += [segment_name(number) for number in live if number not in numbers]
    if not live:
        missing.append(segment_name(manifest.first_segment))
    if missing:
        # Without a manifest its files look like leftovers: better to stop than to remove them.
        lost = MANIFEST if MANIFEST not in found and any(map(is_columns, found)) else missing[0]
        raise Damaged(folder / lost, 0, "it is missing")
    return live
