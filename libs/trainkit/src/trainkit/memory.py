"""Memory that can be given back, and who holds the accelerators'."""

from __future__ import annotations

import gc
import os
import pwd
import shutil
import subprocess
from pathlib import Path

import torch

_QUERY = ["--query-compute-apps=gpu_bus_id,pid,used_gpu_memory", "--format=csv,noheader,nounits"]
_HEAD = ("GPU", "user", "PID", "GB")
_MIB = 2**20


def free() -> None:
    """Gives back what can be given back: unreachable objects, and the accelerator's cache."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def resident_bytes() -> int:
    """Memory of the host that this process holds."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes where there is no /proc


def holders(*, name_others: bool = False) -> str:
    """A table of the processes that hold memory of GPUs on this machine, as `nvidia-smi` sees them.

    Args:
        name_others: also says who other users are.

    Returns:
        One line of headings, and one for each process: the GPU's bus, its user, its PID, and gigabytes of 10^9 bytes.
    """
    rows = [_HEAD, *(_row(line, name_others) for line in _reported())]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _reported() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    asked = subprocess.run([program, *_QUERY], capture_output=True, text=True, check=False, timeout=30)
    return [line for line in asked.stdout.splitlines() if line.count(",") == 2]


def _row(line: str, name_others: bool) -> tuple[str, str, str, str]:
    bus, pid, mebibytes = (part.strip() for part in line.split(","))
    held = f"{int(mebibytes) * _MIB / 1e9:.2f}" if mebibytes.isdigit() else "?"
    return bus, _user(pid, name_others), pid, held


def _user(pid: str, name_others: bool) -> str:
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
        if owner != os.getuid() and not name_others:
            return "another"
        return pwd.getpwuid(owner).pw_name
    except (OSError, KeyError):
        return "?"
