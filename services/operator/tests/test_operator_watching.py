"""What the watch of a cluster tells of."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import kopf
from kubernetes.client import Configuration
from trainyard_operator.watching import Watching

PATIENCE_S = 120


def added(name: str, **metadata: Any) -> kopf.RawEvent:
    said = {"name": name, "namespace": "team", "uid": name, "resourceVersion": "1"} | metadata
    body = {"apiVersion": "trainyard.dev/v1alpha1", "kind": "TrainingJob", "metadata": said, "spec": {}}
    return cast("kopf.RawEvent", {"type": "ADDED", "object": body})


async def test_a_resource_that_cannot_be_read_keeps_nobody_from_hearing_of_the_others() -> None:
    seen: list[str] = []
    heard = asyncio.Event()

    def see(name: str) -> None:
        seen.append(name)
        if name == "last":
            heard.set()

    watching = Watching(Configuration(), [], lambda resource: see(resource.name), lambda uid: None, lambda: heard.set())
    watching._loop = asyncio.get_running_loop()
    for event in (added("odd", resourceVersion="none"), added("next")):
        await watching._event(event)
    await asyncio.sleep(0)
    await watching._event(added("last"))
    await asyncio.wait_for(heard.wait(), PATIENCE_S)
    assert seen == ["next", "last"]
