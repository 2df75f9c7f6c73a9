"""What the kernel offers and Python has no word for."""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGKILL = 9

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Makes this process the new parent of every descendant that loses its own, so that none escapes."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when `parent`'s thread that made it ends.

    Raises:
        ProcessLookupError: `parent` ended before the kernel was asked.
    """
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        raise ProcessLookupError(f"the parent process {parent} is gone")


def start_time(pid: int) -> int:
    """When `pid` started, in clock ticks since boot.

    The same as `trainyard.home.process_start_time`, whose imports take longer than the first stage may.
    """
    with open(f"/proc/{pid}/stat") as file:
        stat = file.read()
    return int(stat[stat.rindex(")") + 2 :].split()[19])


def boot_id() -> str:
    """The id of this boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
