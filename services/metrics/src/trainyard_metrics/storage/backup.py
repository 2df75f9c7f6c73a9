"""A consistent copy of a run, taken while it is written to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainyard_metrics.storage import manifest as manifests
from trainyard_metrics.storage.files import MANIFEST, HeldFile
from trainyard_metrics.storage.manifest import Manifest
from trainyard_metrics.storage.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Copy:
    """One file of a copy.

    Attributes:
        name: within the run's folder.
        size: bytes that belong to the copy; the file itself may be longer.
    """

    name: str
    size: int
    held: HeldFile | None
    content: bytes = b""

    def pieces(self, size: int) -> Iterator[bytes]:
        """The content in parts of at most `size` bytes; at least one, which may be empty.

        Raises:
            FileNotFoundError: the run was removed meanwhile.
            EOFError: the file is shorter than it was.
        """
        if self.held is None:
            yield self.content
            return
        with self.held.path.open("rb") as file:
            left = self.size
            while left or not self.size:
                piece = file.read(min(size, left))
                yield piece
                if not piece:
                    break
                left -= len(piece)
        if left:
            raise EOFError(f"{self.held.path} is {left:,} bytes shorter than it was")


def copies(snapshot: Snapshot, manifest: Manifest) -> list[Copy]:
    """The files that make the run a run again elsewhere. `manifest` is the one of the snapshot's moment."""
    found = [Copy(part.file.name, part.file.size, part.held) for part in snapshot.files]
    found += [Copy(part.held.path.name, part.size, part.held) for part in snapshot.segments if part.size]
    if manifest != Manifest():
        content = manifests.encode(manifest)
        found.append(Copy(MANIFEST, len(content), None, content))
    return found
