"""File descriptors of a service: as many as the system allows, at most half of them for connections.

A soft limit of 1,024 is meant for programs that use `select`. Connections that nobody uses would reach it soon, and a
service without descriptors neither accepts a connection nor opens a file.
"""

from __future__ import annotations

import contextlib
import resource

_ENOUGH = 65_536

_inherited = resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_limit() -> None:
    """Raises this process's soft limit towards its hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def restore_limit(pid: int) -> None:
    """Gives a child the limit that this process was started with: what jobs see is not for a service to change."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, _inherited)


def for_connections() -> int:
    """How many connections a server may hold; the other half is for files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENOUGH // 2 if soft == resource.RLIM_INFINITY else min(soft, _ENOUGH) // 2
