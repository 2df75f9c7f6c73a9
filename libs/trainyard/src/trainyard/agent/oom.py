"""Whether the kernel killed something in this node's control groups for want of memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

# Version 2 of control groups, and version 1.
_FILES = ("memory.events", "memory.oom_control")
OF_CONTAINER = ("/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory/cgroup.procs")
"""A container sees its own groups at these places, again of either version."""


def kills(cgroup_procs: Iterable[str]) -> int:
    """How many processes were killed so far in the groups of these `cgroup.procs` files."""
    return sum(_kills(Path(path).parent / name) for path in cgroup_procs for name in _FILES)


def _kills(file: Path) -> int:
    try:
        found = re.search(r"^oom_kill (\d+)", file.read_text(), re.MULTILINE)
    except OSError:
        return 0  # a group of another kind, or already gone
    return int(found[1]) if found else 0
