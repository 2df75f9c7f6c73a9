"""Small files that are replaced as a whole. The standard library alone."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, content: bytes, mode: int = 0o600, *, durable: bool = False) -> None:
    """Gives a file new content: readers see the old one or the new one, never a part.

    Args:
        mode: of the file.
        durable: survives a power cut, once the folder is synced as well.

    Raises:
        OSError: the disk is full, for instance. The file is as it was, and nothing is beside it.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
