"""What is read and written for the job stays in its folder, whatever links its code or its workers make there."""

from __future__ import annotations

import os
from pathlib import Path


class OutsideJob(Exception):
    """A link leads out of the job's folder, or stands where a file is needed."""


def resolve_inside(root: Path, path: str | Path) -> Path:
    """The path below `root` with every link followed; it need not exist.

    Raises:
        OutsideJob: it is not below `root`.
    """
    top, real = os.path.realpath(root), os.path.realpath(root / path)
    if os.path.commonpath([top, real]) != top:
        raise OutsideJob(
            f"{os.path.relpath(root / path, root)!r} is a link, or below one, to {real!r}, outside of the job's "
            "folder, where nothing is stored from: use a folder in place of the link"
        )
    return Path(real)


def refuse_link_to_file(path: Path) -> None:
    """Refuses a link to a file: a tree that holds the link and not the file would be of no use.

    Raises:
        OutsideJob: it is one.
    """
    if path.is_symlink() and not path.is_dir():
        raise OutsideJob(f"{path.name!r} is a link to {str(path.readlink())!r}: write or copy the file itself there")
