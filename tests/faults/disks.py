"""A small disk of its own, that a test can fill and free."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_BLOCK = 4096


class SmallDisk:
    """A tmpfs mounted at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, leave_bytes: int = 0) -> None:
        """Takes all space but about the last `leave_bytes`."""
        free = os.statvfs(self.folder).f_bavail * _BLOCK
        with self._ballast.open("ab", buffering=0) as file:
            with suppress(OSError):  # whoever writes at the same time may be faster
                os.posix_fallocate(file.fileno(), 0, free - leave_bytes)
            with suppress(OSError):
                while os.statvfs(self.folder).f_bavail * _BLOCK > leave_bytes:
                    file.seek(0, os.SEEK_END)
                    file.write(bytes(_BLOCK))

    def free(self) -> None:
        """Gives back what `fill` took."""
        self._ballast.unlink()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[SmallDisk]:
    """Mounts a disk of this size ("32m"); needs the rights of root."""
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", folder], check=True)
    try:
        yield SmallDisk(folder)
    finally:
        # Lazily: a process that a failed test left may still use it.
        subprocess.run(["umount", "--lazy", folder], check=True)
