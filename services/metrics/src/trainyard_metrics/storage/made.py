"""What a job of the compactor made, as it travels between the processes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from trainyard_metrics.storage.files import TEMPORARY
from trainyard_metrics.storage.manifest import ColumnFile, column_file


@dataclass
class Made:
    """What a job made.

    Attributes:
        files: each is called its name and `suffix`, until whoever asked for it makes it count.
        positions: of each writer, the first number behind the segments.
        line_times: of each writer of lines, the time of its last one.
        names: of series.
    """

    files: list[ColumnFile] = field(default_factory=list)
    positions: dict[str, int] = field(default_factory=dict)
    line_times: dict[str, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    # A process that outlives its server must not touch the files of the next one.
    suffix: str = field(default_factory=lambda: f".{os.getpid()}{TEMPORARY}")


def made_of(document: dict[str, Any]) -> Made:
    """What was made, from JSON."""
    return Made(**{**document, "files": [column_file(file) for file in document["files"]]})
