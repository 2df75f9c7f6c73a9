"""One stream of the scheduler's events for all resources, from where the last one broke off."""

from __future__ import annotations

import asyncio
import logging

from trainyard.errors import NotRunning, YardError

from trainyard_operator.controller import Controller
from trainyard_operator.yard import Yard

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0


class Follower:
    """Keeps the stream."""

    def __init__(self, controller: Controller, yard: Yard) -> None:
        self._controller = controller
        self._yard = yard
        self._seq: int | None = None

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                async for event in self._yard.watch(self._seq, self._connected):
                    self._seq = event.seq
                    self._controller.happened(event)
            except YardError as error:
                level = logging.INFO if isinstance(error, NotRunning) else logging.ERROR
                logger.log(level, "the scheduler's events broke off", extra={"why": str(error)})
            await asyncio.sleep(_PAUSE_S)

    def _connected(self) -> None:
        """Without an event to go on from, what was heard before may be old."""
        if self._seq is None:
            self._controller.distrust()
