"""What processes hold in memory beyond the libraries that they stand on, which weigh differently on every machine."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

# Resident memory at its peak, in KiB.
TELL_PEAK = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
_AGENT_LIBRARIES = "import asyncio, grpc.aio, psutil"


@cache
def agent_libraries_bytes() -> int:
    """What the libraries of an agent alone take in a process of this machine."""
    command = [sys.executable, "-c", f"{_AGENT_LIBRARIES}; {TELL_PEAK}"]
    return int(subprocess.run(command, check=True, capture_output=True).stdout) * 1024
