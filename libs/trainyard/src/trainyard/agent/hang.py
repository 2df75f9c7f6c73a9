"""Notices that a node shows no sign of life: no output, no record, no checkpoint from any of its workers."""

from __future__ import annotations

import asyncio
import time


class Pulse:
    """When the workers were last heard."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def beat(self) -> None:
        """Something was heard."""
        self._last_s = time.monotonic()

    async def silent_for(self, timeout_s: float) -> None:
        """Returns once nothing was heard for `timeout_s`; never, when that is 0."""
        if timeout_s <= 0:
            await asyncio.Event().wait()
        # A deadline that every sign of life moves on; ruff takes it for a poll.
        while (left := self._last_s + timeout_s - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left)
