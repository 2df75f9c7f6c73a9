"""The process a node may be tied to: when it ends, by whatever cause, so does the node."""

from __future__ import annotations

import asyncio
import os

from trainyard.proc import open_process


async def ended(pid: int, start_time: int) -> None:
    """Returns when the process is gone. The kernel tells; nothing is polled."""
    descriptor = open_process(pid, start_time)
    if descriptor is None:
        return
    try:
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(descriptor, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(descriptor)
    finally:
        os.close(descriptor)
