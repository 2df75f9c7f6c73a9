"""Every file of a folder, in a fixed order."""

from __future__ import annotations

import os
from pathlib import Path

from trainyard.artifacts.scan import opened

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def every_file(root: Path) -> list[Path]:
    """Files and links below `root`, relative to it, sorted; a link to a folder is a link, never followed.

    Raises:
        NotADirectoryError, FileNotFoundError: `root` is not a folder.
    """
    found: list[Path] = []
    pending = [""]
    with opened(root) as top:
        while pending:
            folder = pending.pop()
            for name, is_folder in _entries(top, folder or "."):
                path = f"{folder}/{name}" if folder else name
                if is_folder:
                    pending.append(path)
                else:
                    found.append(Path(path))
    return sorted(found)


def _entries(top: int, folder: str) -> list[tuple[str, bool]]:
    descriptor = os.open(folder, _FOLDER, dir_fd=top)
    try:
        with os.scandir(descriptor) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    finally:
        os.close(descriptor)
