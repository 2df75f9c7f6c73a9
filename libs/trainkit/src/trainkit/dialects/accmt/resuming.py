"""Which checkpoint a run goes on from: the dialect's indices are the order in which checkpoints were made."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Literal

from trainkit.checkpoints import folder as folders
from trainkit.checkpoints.snapshot import SHARED

_log = logging.getLogger("trainkit")


def indices(folder: Path) -> dict[int, Path]:
    """The checkpoints that there are, by index from 0; those that were removed keep theirs. Damaged ones have none."""
    found: dict[int, Path] = {}
    for path in (folder / f"step-{step}" for step in folders.steps(folder)):
        try:
            found[json.loads((path / SHARED).read_text())["state"]["checkpoints"] - 1] = path
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("A checkpoint is damaged, and has no index: %s: %r", path / SHARED, error)
    return found


def chosen(resume: bool | int | None, folder: Path) -> Literal["auto", "must"] | Path:
    """What the dialect's `resume` means. False puts earlier checkpoints aside.

    Raises:
        FileNotFoundError: True without a checkpoint.
        IndexError: no checkpoint has this index; says which there are.
    """
    if resume is None:
        return "auto"
    if resume is False:
        _put_aside(folder)
        return "auto"
    present = indices(folder)
    if resume is True or resume == -1:
        if not present:
            raise FileNotFoundError(f"resume={resume!r} and {folder} has no checkpoint")
        return "must"
    if resume not in present:
        raise IndexError(f"no checkpoint has the index {resume}; there are {', '.join(map(str, present)) or 'none'}")
    return present[resume]


def _put_aside(folder: Path) -> None:
    if os.environ.get("RANK", "0") != "0" or not folder.exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    folder.rename(aside)
