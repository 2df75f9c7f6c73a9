"""Which files make a run, in one small file that is replaced as a whole.

    manifest.json := body "\\n" crc "\\n"

`body` is one line of JSON, `crc` the CRC-32 of its bytes in hexadecimal. A run without a manifest has journal
segments alone, from number 0 on.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from trainyard_metrics.storage.files import MANIFEST, Damaged, replace_durably

FORMAT = 1


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A part of a column file that is read, and verified, as a whole."""

    offset: int
    length: int
    crc: int  # CRC-32 of these bytes
    rows: int


@dataclass(frozen=True, slots=True)
class ColumnFile:
    """A column file.

    Attributes:
        kind: "points" or "lines".
        first, last: the journal segments whose records it has.
        level: 0 when made of segments; one more than the files it was merged from.
        size: bytes of the file.
        groups: its row groups, in order. Every byte of the file is in a group, in the footer, or in the magic number
            at its start, so that each is verified when it is read.
        footer: the bytes behind the last row group.
        names: of series; empty for lines.
        writers: the first and last record number in it of each writer.
    """

    name: str
    kind: str
    first: int
    last: int
    level: int
    size: int
    groups: tuple[RowGroup, ...]
    footer: RowGroup
    writers: dict[str, tuple[int, int]]

    @property
    def rows(self) -> int:
        """Points, or lines."""
        return sum(group.rows for group in self.groups)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was compacted of a run.

    Attributes:
        first_segment: the first journal segment that is not in column files.
        positions: of each writer, the first number that is in no column file.
        line_times: of each writer of lines, the time of its last line in column files.
        names: of all series in column files.
        files: by kind, then by segments.
    """

    first_segment: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    line_times: dict[str, int] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    files: tuple[ColumnFile, ...] = ()

    def of_kind(self, kind: str) -> list[ColumnFile]:
        """The files of points, or of lines, oldest first."""
        return [file for file in self.files if file.kind == kind]

    def exchange(self, old: set[str], new: tuple[ColumnFile, ...]) -> Manifest:
        """The same with some files in the place of others."""
        files = [file for file in self.files if file.name not in old] + list(new)
        return replace(self, files=tuple(sorted(files, key=lambda file: (file.kind, file.first))))


def column_file(document: dict[str, object]) -> ColumnFile:
    """A column file from JSON."""
    fields = dict(document)
    fields["groups"] = tuple(RowGroup(**group) for group in fields["groups"])  # type: ignore[attr-defined]
    fields["footer"] = RowGroup(**fields["footer"])  # type: ignore[arg-type]
    fields["writers"] = {writer: (first, last) for writer, (first, last) in fields["writers"].items()}  # type: ignore[attr-defined]
    return ColumnFile(**fields)  # type: ignore[arg-type]


def store(folder: Path, manifest: Manifest) -> None:
    """Replaces a run's manifest, durably.

    Raises:
        OSError: the old one is still there.
    """
    replace_durably(folder / MANIFEST, encode(manifest))


def encode(manifest: Manifest) -> bytes:
    """A manifest as it is on disk."""
    body = json.dumps({"format": FORMAT, **asdict(manifest)}, separators=(",", ":")).encode()
    return b"%s\n%08x\n" % (body, zlib.crc32(body))


def load(folder: Path) -> Manifest:
    """A run's manifest; an empty one when there is none.

    Raises:
        Damaged
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Manifest()
    body, _, rest = content.partition(b"\n")
    if rest != b"%08x\n" % zlib.crc32(body):
        raise Damaged(path, 0, "it does not match its checksum")
    document = json.loads(body)
    if document.pop("format") != FORMAT:
        raise Damaged(path, 0, "its format is of another version of Trainyard")
    document["names"] = tuple(document["names"])
    document["files"] = tuple(column_file(file) for file in document["files"])
    return Manifest(**document)
