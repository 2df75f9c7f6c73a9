"""A bare asynchronous client of an API server: aiohttp and JSON, as many requests at once as pay, no limits.

It makes what a peer or a user would make, clears up, counts pods and reads the API server's own numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import _repository  # noqa: F401
import aiohttp

from scripts.testbed.cluster import certificates
from scripts.testbed.cluster.layout import Layout

T = TypeVar("T")
Object = dict[str, Any]
AT_ONCE = 32
RESOURCES = "/apis/trainyard.dev/v1alpha1/namespaces/{}/trainingjobs"
_STALL_S = 120
_LINE_BYTES = 4 * 1024 * 1024
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_REQUESTS = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Raw:
    """The administrator of a cluster; enter it on a loop."""

    def __init__(self, layout: Layout) -> None:
        self._base = layout.api
        self._tls = ssl.create_default_context(cafile=str(certificates.pair(layout, "ca").certificate))
        files = certificates.pair(layout, certificates.ADMIN)
        self._tls.load_cert_chain(files.certificate, files.key)
        self._turn = asyncio.Semaphore(AT_ONCE)

    @classmethod
    def run(cls, layout: Layout, work: Callable[[Raw], Awaitable[T]]) -> T:
        """Does something with a client, on a loop of its own."""

        async def with_client() -> T:
            async with cls(layout) as raw:
                return await work(raw)

        return asyncio.run(with_client())

    async def __aenter__(self) -> Raw:
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, read_bufsize=_LINE_BYTES)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> Object:
        return dict(json.loads(await self._text("GET", path)))

    async def create(self, path: str, body: Mapping[str, Any]) -> Object:
        return dict(json.loads(await self._text("POST", path, body)))

    async def apply(self, path: str, body: Mapping[str, Any]) -> Object:
        """Server-side apply."""
        name = body["metadata"]["name"]
        return dict(json.loads(await self._text("PATCH", f"{path}/{name}?fieldManager=bench&force=true", body, _APPLY)))

    async def patch(self, path: str, body: Mapping[str, Any]) -> Object:
        """A merge patch."""
        return dict(json.loads(await self._text("PATCH", path, body, _MERGE)))

    async def all(self, requests: Iterable[Awaitable[T]]) -> list[T]:
        """Some of them at once, and all in the end."""

        async def in_turn(request: Awaitable[T]) -> T:
            async with self._turn:
                return await request

        return await asyncio.gather(*map(in_turn, requests))

    async def text(self, path: str) -> str:
        """What is no JSON, such as a log."""
        return await self._text("GET", path)

    async def _text(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, kind: str = "application/json"
    ) -> str:
        headers = {"Content-Type": kind} if body is not None else {}
        data = json.dumps(body).encode() if body is not None else None
        async with self._session.request(method, self._base + path, data=data, headers=headers) as response:
            text = await response.text()
        if response.status >= 400:
            raise RuntimeError(f"{method} {path}: {response.status}: {text[:500]}")
        return text

    @contextlib.asynccontextmanager
    async def pods(self, namespace: str) -> AsyncIterator[RunningPods]:
        """Counts the pods of a namespace that run, from its list on."""
        path = f"/api/v1/namespaces/{namespace}/pods"
        version = (await self.get(f"{path}?limit=1"))["metadata"]["resourceVersion"]
        running = RunningPods(version)
        reading = asyncio.create_task(self._follow(path, running))
        try:
            yield running
        finally:
            reading.cancel()

    async def _follow(self, path: str, running: RunningPods) -> None:
        try:
            async for event in self.watch(path, running.version):
                running.take(event)
        except Exception as error:
            running.fail(error)

    async def watch(self, path: str, version: str) -> AsyncIterator[Object]:
        """What becomes of the objects of a collection after a version, for ever; a watch that ends is taken up again.

        Raises:
            RuntimeError: the API server tells no more.
        """
        while True:
            url = f"{self._base}{path}?watch=true&allowWatchBookmarks=true&resourceVersion={version}"
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=None)) as response:
                async for line in response.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise RuntimeError(f"the watch of {path} broke off: {event['object']}")
                    version = event["object"]["metadata"]["resourceVersion"]
                    yield event

    async def clear(self, namespace: str) -> None:
        """Removes what benchmarks make, without the pods' grace periods: a namespace waits for half of them."""
        await self._let_go(namespace)
        for kinds in (RESOURCES.format(namespace), f"/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs"):
            with contextlib.suppress(RuntimeError):  # a kind that this cluster does not know
                await self._text("DELETE", kinds)
        await self._text("DELETE", f"/apis/batch/v1/namespaces/{namespace}/jobs?propagationPolicy=Background")
        await self._text("DELETE", f"/api/v1/namespaces/{namespace}/pods?gracePeriodSeconds=0")

    async def _let_go(self, namespace: str) -> None:
        """Nobody is there any more who would remove the finalizers of resources."""
        path = RESOURCES.format(namespace)
        with contextlib.suppress(RuntimeError):
            names = [each["metadata"]["name"] for each in (await self.get(path))["items"]]
            free = {"metadata": {"finalizers": None}}
            await self.all(self.patch(f"{path}/{name}", free) for name in names)

    async def requests(self) -> Counter[tuple[str, str]]:
        """How many requests the API server has answered, by verb and resource; watches are one each."""
        found: Counter[tuple[str, str]] = Counter()
        for labels, count in _REQUESTS.findall(await self._text("GET", "/metrics")):
            said = dict(_LABEL.findall(labels))
            what = "/".join(filter(None, (said.get("resource", ""), said.get("subresource", ""))))
            found[said.get("verb", ""), what] += int(float(count))
        return found


class RunningPods:
    """The pods that were seen to run."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.names: set[str] = set()
        self._wanted = 0
        self._reached = asyncio.Event()
        self._failed: Exception | None = None

    def take(self, event: Object) -> None:
        """What the API server tells."""
        if event["object"].get("status", {}).get("phase") == "Running":
            self.names.add(event["object"]["metadata"]["name"])
        if self._wanted and len(self.names) >= self._wanted:
            self._reached.set()

    def fail(self, error: Exception) -> None:
        """Nobody tells any more."""
        self._failed = error
        self._reached.set()

    async def reach(self, count: int) -> None:
        """Returns when so many run.

        Raises:
            RuntimeError: they do not, or nobody can tell any more.
        """
        self._wanted = count
        self._reached.clear()
        while len(self.names) < count and self._failed is None:
            known = len(self.names)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reached.wait(), _STALL_S)
            if len(self.names) == known:
                raise RuntimeError(f"{known} of {count} pods run, and for {_STALL_S} s no other one")
        if self._failed is not None:
            raise self._failed
