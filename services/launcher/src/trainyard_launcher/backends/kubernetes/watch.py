"""A mirror of some of the cluster's objects: listed once, then watched.

    list (resourceVersion) -> watch from there -> each event moves the version on
    the connection breaks  -> watch again from the last version
    410 Gone               -> list again; what is missing in the list was deleted meanwhile

Nothing is asked for again while a watch runs, however many objects there are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from trainyard.cluster import Api, ApiError

from trainyard_launcher.scheduler import backoff

logger = logging.getLogger(__name__)

T = TypeVar("T")
_PAGE = "500"
_GONE = 410


class Mirror(Generic[T]):
    """Objects by name, kept as small as `keep` makes them.

    Args:
        path: of the collection.
        keep: what is kept of an object; None for one that is of no interest.
        changed: called with the name and what was kept before and after; None for not there. Not called for what the
            first list finds.
        key: of an object, from its metadata; its name alone unless told otherwise.
        params: selectors.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        keep: Callable[[dict[str, Any]], T | None],
        changed: Callable[[str, T | None, T | None], None],
        key: Callable[[Mapping[str, Any]], str] = lambda metadata: str(metadata["name"]),
        **params: str,
    ) -> None:
        self._api, self._path, self._params = api, path, params
        self._keep, self._changed, self._key = keep, changed, key
        self._version = ""
        self.objects: dict[str, T] = {}
        self.synced = asyncio.Event()

    async def run(self) -> None:
        """For ever."""
        pauses = backoff()
        while True:
            try:
                if not self._version:
                    await self._list()
                    pauses = backoff()
                async for event in self._api.watch(self._path, resourceVersion=self._version, **self._params):
                    self._take(event)
                    pauses = backoff()
            except ApiError as error:
                if error.status == _GONE:
                    self._version = ""
                    continue
                logger.info("watch broke off", extra={"path": self._path, "code": error.status, "why": str(error)})
                await asyncio.sleep(next(pauses))
            except Exception:
                # A watch that has ended looks like a cluster in which nothing happens: no pod would ever end.
                logger.exception("what the cluster said was not understood", extra={"path": self._path})
                self._version = ""
                await asyncio.sleep(next(pauses))

    async def _list(self) -> None:
        found: dict[str, T] = {}
        page = {"limit": _PAGE}
        while True:
            answer = await self._api.get(self._path, **self._params, **page)
            for each in answer["items"]:
                kept = self._keep(each)
                if kept is not None:
                    found[self._key(each["metadata"])] = kept
            if not answer["metadata"].get("continue"):
                break
            page["continue"] = answer["metadata"]["continue"]
        self._version = answer["metadata"]["resourceVersion"]
        before, self.objects = self.objects, found
        if not self.synced.is_set():
            self.synced.set()
            return
        for name in before.keys() | found.keys():
            self._tell(name, before.get(name), found.get(name))

    def _take(self, event: dict[str, Any]) -> None:
        kind, each = event["type"], event["object"]
        if kind == "ERROR":
            raise ApiError(int(each.get("code", 0)), str(each.get("reason", "")), str(each.get("message", "")))
        self._version = each["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return
        name = self._key(each["metadata"])
        kept = self._keep(each)
        before = self.objects.pop(name, None)
        if kind != "DELETED" and kept is not None:
            self.objects[name] = kept
            self._tell(name, before, kept)
        else:
            self._tell(name, kept or before, None)

    def _tell(self, name: str, before: T | None, after: T | None) -> None:
        """One object that makes trouble keeps nothing from the others."""
        try:
            self._changed(name, before, after)
        except Exception:
            logger.exception("a change was not dealt with", extra={"path": self._path, "object": name})
