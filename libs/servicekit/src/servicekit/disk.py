"""Names in folders, made durable."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Makes what was created, renamed or removed in a folder durable.

    Raises:
        OSError: there is no such folder, or the disk failed.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
