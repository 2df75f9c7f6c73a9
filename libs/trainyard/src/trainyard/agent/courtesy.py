"""Training comes first: what this agent does beside it takes the time that workers leave."""

from __future__ import annotations

import os
from pathlib import Path

NICENESS = 10
"""Beside a busy worker the agent gets a tenth of a core; the kernel serves its reads and writes later as well."""


def yield_to_workers() -> None:
    """Lowers the priority of every thread of this process, and of those they will start. There is no way back, and
    processes started from now on inherit it: call it when the workers are running.
    """
    for thread in [int(entry.name) for entry in Path("/proc/self/task").iterdir()]:
        try:
            os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
        except ProcessLookupError:
            continue  # it ended meanwhile
