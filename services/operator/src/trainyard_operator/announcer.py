"""Posts events of resources, one after the other and behind everything that matters more."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

from trainyard.cluster import Api, ApiError
from trainyard_protos.v1 import scheduler_pb2 as pb

from trainyard_operator import words
from trainyard_operator.resource import Resource

logger = logging.getLogger(__name__)

_WAITING_MAX = 10_000
_PAUSE_S = 2.0
_EXISTS = 409


class Announcer:
    """Events that wait to be posted; the oldest are dropped when there are too many."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_WAITING_MAX)
        self._wake = asyncio.Event()

    def tell(self, event: pb.Event, resource: Resource) -> None:
        """The yard's event becomes one of the resource, if it is of interest there."""
        if words.told(event):
            self.post(words.of_event(event, resource))

    def post(self, event: dict[str, Any]) -> None:
        """Soon."""
        self._waiting.append(event)
        self._wake.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._post(self._waiting.popleft())

    async def _post(self, event: dict[str, Any]) -> None:
        path = f"/api/v1/namespaces/{event['metadata']['namespace']}/events"
        try:
            await self._api.create(path, event)
        except ApiError as error:
            if error.away:
                self._waiting.appendleft(event)
                await asyncio.sleep(_PAUSE_S)
            elif error.status != _EXISTS:  # told before, by an earlier life of the operator
                logger.info("event not posted", extra={"event_name": event["metadata"]["name"], "why": str(error)})
