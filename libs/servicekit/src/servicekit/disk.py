"""Files and names in folders, made durable."""

from __future__ import annotations

import os
import secrets
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


def create_once(path: Path, content: bytes) -> bytes:
    """Content of a file that only its owner may read, made at first use and on disk on return.

    Safe when two processes begin at once, and at a power cut: the file is whole, or not there.

    Raises:
        OSError: it cannot be made or read.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return path.read_bytes()
    finally:
        temporary.unlink()
    sync_folder(path.parent)
    return content
