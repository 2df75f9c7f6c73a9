"""Delivers what nodes left behind, one after the other, for as long as metrics does not take it.

Which nodes those are is on disk, as marks in the folders of their attempts: the next launcher goes on with them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import grpc

from trainyard_launcher.background import Background
from trainyard_launcher.scheduler import backoff, is_away

logger = logging.getLogger(__name__)

_MOST_S = 10.0  # between two tries

Node = tuple[str, int]


class Delivery:
    """What waits for delivery. It runs only while there is something.

    Args:
        deliver: tries it for an attempt's node; whether nothing is left to be tried. May raise `AioRpcError`.
    """

    def __init__(self, deliver: Callable[[str, int], Awaitable[bool]], background: Background) -> None:
        self._deliver = deliver
        self._background = background
        self._waiting: deque[Node] = deque()
        self._current: Node | None = None
        self._trying: asyncio.Future[bool] | None = None
        self._running = False

    def add(self, attempt_id: str, index: int) -> None:
        """A node whose records metrics lacks; one that waits already is not added again."""
        if (attempt_id, index) not in (*self._waiting, self._current):
            self._waiting.append((attempt_id, index))
        if not self._running:
            self._running = True
            self._background.run(self._run(), "delivery of records")

    async def drop(self, attempt_ids: Iterable[str]) -> None:
        """Gives up the nodes of some attempts. Nothing of them is delivered when this returns."""
        gone = frozenset(attempt_ids)
        self._waiting = deque(node for node in self._waiting if node[0] not in gone)
        if self._trying is not None and self._current is not None and self._current[0] in gone:
            self._trying.cancel()
            await asyncio.wait([self._trying])

    async def _run(self) -> None:
        try:
            pauses = backoff(most_s=_MOST_S)
            while self._waiting:
                if await self._try(self._waiting.popleft()):
                    pauses = backoff(most_s=_MOST_S)
                else:
                    await asyncio.sleep(next(pauses))
        finally:
            self._running = False

    async def _try(self, node: Node) -> bool:
        """One try; what was not delivered has its next turn behind all others."""
        self._current, self._trying = node, asyncio.ensure_future(self._deliver(*node))
        try:
            await asyncio.wait([self._trying])
        finally:
            self._trying.cancel()
            [result] = await asyncio.gather(self._trying, return_exceptions=True)
            self._current, self._trying = None, None
        if isinstance(result, grpc.aio.AioRpcError) and is_away(result):
            logger.info("metrics is away", extra={"attempt": node[0], "node": node[1], "why": result.details()})
        elif isinstance(result, Exception):
            logger.error("delivery failed", extra={"attempt": node[0], "node": node[1]}, exc_info=result)
        done = result is True or isinstance(result, asyncio.CancelledError)
        if not done:
            self._waiting.append(node)
        return done
