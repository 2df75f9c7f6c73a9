"""Receives the requests of callers that have no token: few at a time, so that they cannot fill the memory.

gRPC receives a whole message, of up to 16 MiB, before its size can be looked at. A call that sends none holds its
place only while no other call wants it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from servicekit.errors import DeadlineExceeded
from servicekit.requests import ParsedRequests

_AT_ONCE = 4
_TIMEOUT_S = 10.0
_TIMEOUT_WHILE_OTHERS_WAIT_S = 0.5
_MAX_WAITING = 1000


class Receptions:
    """The places of one group of methods. A place that becomes free goes to the newest call: the callers of the oldest
    ones are the most likely to have gone, and calls that send nothing cannot queue up in front of one that does."""

    def __init__(self) -> None:
        self._free = _AT_ONCE
        self._receiving: dict[asyncio.Timeout, float] = {}  # with the time of the loop at which each began
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def receive(self, requests: ParsedRequests) -> Any:
        """The only request of a call; what gRPC received for it is freed when this returns.

        Raises:
            DeadlineExceeded: NoRequest: none was sent in time.
            InvalidArgument: see `RequestReader.read`.
        """
        try:
            await self._take_place()
            try:
                return await self._receive(requests)
            finally:
                self._pass_on()
        except (TimeoutError, StopAsyncIteration):
            raise DeadlineExceeded(
                f"no request was received: there are {_TIMEOUT_S:g} s for it, and {_TIMEOUT_WHILE_OTHERS_WAIT_S:g} s "
                "while other calls wait",
                reason="NoRequest",
                hint="send the request together with the call; try again",
            ) from None
        finally:
            await requests.close()  # also when it is refused

    async def _receive(self, requests: ParsedRequests) -> Any:
        async with asyncio.timeout(_TIMEOUT_WHILE_OTHERS_WAIT_S if self._waiting else _TIMEOUT_S) as limit:
            self._receiving[limit] = asyncio.get_running_loop().time()
            try:
                return await anext(requests)
            finally:
                del self._receiving[limit]

    async def _take_place(self) -> None:
        if self._free:
            self._free -= 1
            return
        self._hurry()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        if len(self._waiting) > _MAX_WAITING:
            self._waiting.popleft().set_exception(TimeoutError())
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await place
        except (TimeoutError, asyncio.CancelledError):
            if place in self._waiting:
                self._waiting.remove(place)
            elif place.done() and not place.cancelled() and place.exception() is None:
                self._pass_on()  # it got one when it had just given up
            raise

    def _hurry(self) -> None:
        """Ends calls that have been silent for too long now that another one waits."""
        for limit, began in self._receiving.items():
            if not limit.expired():
                limit.reschedule(min(limit.when() or began, began + _TIMEOUT_WHILE_OTHERS_WAIT_S))

    def _pass_on(self) -> None:
        while self._waiting:
            place = self._waiting.pop()
            if not place.done():
                place.set_result(None)
                return
        self._free += 1
