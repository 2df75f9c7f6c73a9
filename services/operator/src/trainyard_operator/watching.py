"""The watch of the cluster's resources, by kopf.

kopf runs in a thread with a loop of its own: it takes over the signals of a main thread, and at its end cancels every
task of its loop. Only its plain events are used, for which it writes nothing into resources; what is to be done for a
resource is the Controller's own to decide, retry and bound.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import kopf
from kubernetes.client import Configuration
from trainyard.cluster import authorization
from trainyard.spec.resource import GROUP, PLURAL, VERSION

from trainyard_operator.resource import Resource, read

logger = logging.getLogger(__name__)

_END_S = 10.0
_WATCH_S = 600  # whole: it goes into a query


class Watching:
    """Tells of resources from the cluster's first list on.

    Args:
        configuration: how the API server is reached.
        namespaces: those that are watched; empty: all.
        seen: called on the loop that `start` was called on, with each resource that is there.
        gone: called there with the uid of each that is not any more.
        failed: called there when the watch ends by itself.
    """

    def __init__(
        self,
        configuration: Configuration,
        namespaces: Sequence[str],
        seen: Callable[[Resource], None],
        gone: Callable[[str], None],
        failed: Callable[[], None],
    ) -> None:
        self._configuration = configuration
        self._namespaces = namespaces
        self._seen, self._gone, self._failed = seen, gone, failed
        self._news: deque[kopf.RawEvent] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)

    def start(self) -> None:
        """Begins; on the loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends it."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join, _END_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except Exception:
            logger.exception("the watch of resources failed")
            self._loop.call_soon_threadsafe(self._failed)

    async def _watch(self) -> None:
        """Until `stop`, or until a part of kopf ends by itself: kopf alone would then wait for its other parts."""
        parts = await kopf.spawn_tasks(
            registry=self._registry(),
            settings=_settings(),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._stop,
        )
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        if not self._stop.is_set():
            logger.critical("the watch of resources ended")
            self._loop.call_soon_threadsafe(self._failed)

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self._login)
        kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(self._event)
        return registry

    def _login(self, **_: Any) -> kopf.ConnectionInfo:
        known = self._configuration
        scheme, _space, token = authorization(known).rpartition(" ")
        return kopf.ConnectionInfo(
            server=known.host,
            ca_path=known.ssl_ca_cert,
            insecure=not known.verify_ssl,
            scheme=scheme or None,
            token=token or None,
            certificate_path=known.cert_file,
            private_key_path=known.key_file,
        )

    async def _event(self, event: kopf.RawEvent, **_: Any) -> None:
        self._news.append(event)
        if len(self._news) == 1:  # the others are told of together with the first
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        while self._news:
            event = self._news.popleft()
            try:
                self._tell_of(event)
            except Exception:  # of one resource; the others are still told of
                logger.exception("a resource could not be read", extra={"resource": event["object"].get("metadata")})

    def _tell_of(self, event: kopf.RawEvent) -> None:
        if event["type"] == "DELETED":
            self._gone(event["object"]["metadata"]["uid"])
        else:
            self._seen(read(event["object"]))


class _Nothing(kopf.DiffBaseStorage):
    """kopf would copy every resource to compare it with what it was, which only handlers of changes ask for."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """There is nothing to be stored."""


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # events are posted by us, from what the yard says
    settings.scanning.disabled = True  # neither namespaces nor definitions are watched
    settings.watching.server_timeout = _WATCH_S
    settings.queueing.worker_limit = None
    settings.persistence.diffbase_storage = _Nothing()
    return settings
