"""Memory for large messages.

The C library gives blocks of some hundred KiB back to the kernel as soon as they are freed and asks for them again
right after: each time the kernel clears their pages, which costs as much as sending or receiving the bytes. Keeping
some of them at hand halves what a GB moved costs in system time.

This is the whole process's setting, so that only programs make it, the store and the `yard` command: never the library
in somebody else's process, and not the agent, which keeps small.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # <malloc.h>
_MIB = 1024 * 1024


def keep_large_blocks() -> None:
    """Lets this process keep up to 128 MiB of freed memory; where there is no `mallopt`, nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value in ((_MMAP_THRESHOLD, 32 * _MIB), (_TRIM_THRESHOLD, 128 * _MIB), (_TOP_PAD, 16 * _MIB)):
        mallopt(parameter, value)
