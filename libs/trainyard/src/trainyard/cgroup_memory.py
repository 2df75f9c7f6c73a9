"""Memory of Linux control groups, versions 1 and 2: the highest use, the limit, and what the kernel killed at it.

The standard library alone: the agent and the launcher use this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

OF_CONTAINER = ("/sys/fs/cgroup", "/sys/fs/cgroup/memory")
"""Where a container sees its own groups, of either version."""
_UNLIMITED = 2**60
"""Version 1 shows the largest multiple of the page size for a group without a limit."""


class GroupMemory(NamedTuple):
    """What the kernel counts for a group of processes."""

    peak_bytes: int
    """Highest use since the group was made, with file cache; 0 when the kernel does not count it."""
    limit_bytes: int
    """0 when there is none."""
    oom_kills: int
    """Processes that the kernel killed because the group reached its limit."""


def read(folders: Iterable[str | Path]) -> GroupMemory | None:
    """The memory of the first of these groups that counts memory; None when none of them does."""
    for folder in map(Path, folders):
        kills = _number(folder / "memory.events", r"^oom_kill (\d+)")
        if kills is not None:
            return GroupMemory(_number(folder / "memory.peak") or 0, _limit(folder / "memory.max"), kills)
        kills = _number(folder / "memory.oom_control", r"^oom_kill (\d+)")
        if kills is not None:
            peak = _number(folder / "memory.max_usage_in_bytes") or 0
            return GroupMemory(peak, _limit(folder / "memory.limit_in_bytes"), kills)
    return None


def _limit(file: Path) -> int:
    found = _number(file) or 0
    return found if found < _UNLIMITED else 0


def _number(file: Path, pattern: str = r"^(\d+)$") -> int | None:
    try:
        found = re.search(pattern, file.read_text(), re.MULTILINE)
    except OSError:
        return None  # of another version, or already removed
    return int(found[1]) if found else None
