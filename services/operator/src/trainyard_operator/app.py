"""The operator, put together."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from typing import Any

import grpc
from kubernetes.client import Configuration
from prometheus_client import CollectorRegistry, Gauge
from trainyard.client.connection import Connection, Target
from trainyard.cluster import Api

from trainyard_operator.announcer import Announcer
from trainyard_operator.controller import Controller
from trainyard_operator.follow import Follower
from trainyard_operator.rounds import Rounds
from trainyard_operator.settings import Settings
from trainyard_operator.watching import Watching
from trainyard_operator.yard import Yard

logger = logging.getLogger(__name__)


class Operator:
    """A `servicekit.service.Service`.

    Args:
        configuration: how the API server is reached.
        target: the yard.
        settings: bounds and times.
        registry: where metrics are shown.
    """

    name = "operator"

    def __init__(
        self, *, configuration: Configuration, target: Target, settings: Settings, registry: CollectorRegistry
    ) -> None:
        self._configuration = configuration
        self._target = target
        self._settings = settings
        self._resources = Gauge(
            "trainyard_operator_resources", "TrainingJob resources that are known", registry=registry
        )
        self._tasks: list[asyncio.Task[None]] = []

    def register(self, server: grpc.aio.Server) -> None:
        """It has no calls of its own."""

    async def start(self) -> None:
        """Begins to follow the yard, then to watch the cluster."""
        settings = self._settings
        self._api = Api(
            self._configuration, qps=settings.qps, burst=settings.burst, timeout_s=settings.request_timeout_s
        )
        self._yard = Yard(Connection(self._target), settings.call_timeout_s)
        announcer = Announcer(self._api)
        self._controller = Controller(self._api, self._yard, announcer, settings)
        self._resources.set_function(lambda: len(self._controller.roster))
        self._controller.queue.start()
        self._keep(Follower(self._controller, self._yard).run(), "events of the yard")
        self._keep(announcer.run(), "events of resources")
        self._keep(Rounds(self._controller, self._yard, settings).run(), "rounds")
        self._watching = Watching(
            self._configuration, settings.watched, self._controller.seen, self._controller.gone, _give_up
        )
        logging.getLogger("kopf").setLevel(logging.WARNING)  # it tells of every single event
        self._watching.start()

    def _keep(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(_ended)
        self._tasks.append(task)

    async def stop(self) -> None:
        """Ends; jobs go on, and what happens meanwhile is read at the next start."""
        await self._controller.queue.stop()  # first: after an uninstall nothing may be written any more
        await self._watching.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._yard.close()
        await self._api.close()


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        logger.critical("a part of the operator failed", extra={"part": task.get_name()}, exc_info=task.exception())
        _give_up()


def _give_up() -> None:
    """Without one of its parts the operator would look well and do nothing: whoever started it starts it again."""
    os.kill(os.getpid(), signal.SIGTERM)
