"""Notices that a node shows no sign of life: no output, no record, no checkpoint from any of its workers."""

from __future__ import annotations

import asyncio

_LOOKS = 10  # within the time that counts as silence


class Pulse:
    """Whether the workers were heard.

    Silence is counted in looks, each of which stands for the same time however late it comes: while this process did
    not run, because the machine stood still, it could hear nothing, and the workers could say nothing.
    """

    def __init__(self) -> None:
        self._quiet_looks = 0

    def beat(self) -> None:
        """Something was heard."""
        self._quiet_looks = 0

    async def silent_for(self, timeout_s: float) -> None:
        """Returns once nothing was heard for `timeout_s`; never, when that is 0."""
        if timeout_s <= 0:
            await asyncio.Event().wait()
        while self._quiet_looks <= _LOOKS:  # the first may come right after a beat
            await asyncio.sleep(timeout_s / _LOOKS)
            self._quiet_looks += 1
