"""The process a node may be tied to: when it ends, by whatever cause, so does the node."""

from __future__ import annotations

import asyncio
import os

from trainyard.home import process_start_time


async def ended(pid: int, start_time: int) -> None:
    """Returns when the process is gone. The kernel tells; nothing is polled."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # The pid could have been taken by another process before the descriptor was opened; not after.
        if start_time and process_start_time(pid) != start_time:
            return
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(descriptor, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(descriptor)
    finally:
        os.close(descriptor)
