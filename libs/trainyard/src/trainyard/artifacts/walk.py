"""Every file of a folder, in a fixed order."""

from __future__ import annotations

import os
from pathlib import Path


def every_file(root: Path) -> list[Path]:
    """Files and links below `root`, relative to it, sorted; a link to a folder is a link, never followed.

    Raises:
        NotADirectoryError, FileNotFoundError: `root` is not a folder.
    """
    found: list[Path] = []
    pending = [root]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
                else:
                    found.append(Path(entry.path).relative_to(root))
    return sorted(found)
