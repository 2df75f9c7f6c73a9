"""How a resource becomes a job, and what is written of that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import pytest
from trainyard.channel import MAX_MESSAGE_BYTES
from trainyard.client.connection import Connection
from trainyard.cluster import Api
from trainyard_operator import yard as yards
from trainyard_operator.announcer import Announcer
from trainyard_operator.controller import Controller
from trainyard_operator.resource import FINALIZER, read
from trainyard_operator.settings import Settings
from trainyard_operator.yard import Yard
from trainyard_protos.v1 import scheduler_pb2 as pb

PATIENCE_S = 120
QUEUED = pb.Job(id="j-1", state=pb.JOB_STATE_QUEUED, event_seq=1, pending=pb.Pending(reason="WaitingForCapacity"))
ADMITTED = pb.Event(seq=2, kind="Job", object_id="j-1", type="Admitted", state=pb.JOB_STATE_STARTING, message="on a")
CLAIMED = pb.Event(seq=3, kind="Job", object_id="j-1", type="Claimed", state=pb.JOB_STATE_STARTING)


class Stored:
    """The API server's one resource, which nobody has seen yet."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {"name": "a", "namespace": "team", "uid": "u-1", "resourceVersion": "1"}
        self.body: dict[str, Any] = {
            "apiVersion": "trainyard.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": self.metadata,
            "spec": {"command": ["true"]},
            "status": {},
        }
        self.phases: list[str] = []
        self.written = asyncio.Event()

    async def patch(self, path: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        self.metadata |= patch["metadata"] | {"resourceVersion": str(int(self.metadata["resourceVersion"]) + 1)}
        if path.endswith("/status"):
            self.body["status"] |= patch["status"]
            self.phases.append(patch["status"]["phase"])
            self.written.set()
        return self.body


class Submitting:
    """A yard that takes the job, and tells what becomes of it while the answer is on its way.

    Attributes:
        held: whether the resource had its finalizer when it was submitted.
    """

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self.held: list[bool] = []

    async def submit(self, request: pb.SubmitRequest) -> pb.SubmitResponse:
        self.held.append(FINALIZER in self._stored.metadata.get("finalizers", ()))
        return pb.SubmitResponse(job=QUEUED, created=True)


class Seen:
    """A controller that works on the resource."""

    def __init__(self) -> None:
        self.stored = Stored()
        self.yard = Submitting(self.stored)
        api = cast("Api", self.stored)
        self.controller = Controller(api, cast("Yard", self.yard), Announcer(api), Settings())
        self.controller.seen(read(self.stored.body))

    async def work(self) -> None:
        await self.controller._reconcile("u-1")


@pytest.fixture
async def seen() -> AsyncIterator[Seen]:
    found = Seen()
    yield found
    await found.controller.queue.stop()


async def test_a_resource_is_held_before_it_is_submitted(seen: Seen) -> None:
    await seen.work()
    assert seen.yard.held == [True]


async def test_a_job_that_is_admitted_at_once_is_told_of_once(seen: Seen) -> None:
    await seen.work()
    for event in (ADMITTED, CLAIMED):
        seen.controller.happened(event)
        await seen.work()
    assert seen.stored.phases == ["Starting"]
    assert (seen.stored.body["status"]["jobId"], seen.stored.body["status"].get("message")) == ("j-1", None)


async def test_a_job_that_waits_is_told_of_soon(seen: Seen) -> None:
    seen.controller.queue.start()
    await asyncio.wait_for(seen.stored.written.wait(), PATIENCE_S)
    assert seen.stored.phases == ["Queued"]
    assert seen.stored.body["status"]["reason"] == "WaitingForCapacity"


class Scheduler:
    """Takes batches, and notes how large they are."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.scheduler = self

    async def SubmitBatch(self, request: pb.SubmitBatchRequest) -> pb.SubmitBatchResponse:
        self.sizes.append(len(request.requests))
        results = [pb.SubmitBatchResponse.Result(submitted=pb.SubmitResponse(job=QUEUED)) for _ in request.requests]
        return pb.SubmitBatchResponse(results=results)

    async def call(self, method: Any, request: Any, timeout_s: float) -> Any:
        return await method(request)

    async def close(self) -> None:
        """There is nothing to be closed."""


async def test_one_submission_leaves_at_once_and_those_of_a_flood_leave_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    over = asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if seconds > 0:
            await over.wait()

    monkeypatch.setattr(yards, "_APART_S", 3600)
    scheduler = Scheduler()
    yard = Yard(cast("Connection", scheduler), 30)
    monkeypatch.setattr(yards.asyncio, "sleep", sleep)
    await yard.submit(pb.SubmitRequest())
    assert scheduler.sizes == [1]
    flood = [asyncio.create_task(yard.submit(pb.SubmitRequest())) for _ in range(3)]
    while len(pauses) < 2:
        await asyncio.wait(flood, timeout=0)
    assert scheduler.sizes == [1]
    flood.append(asyncio.create_task(yard.submit(pb.SubmitRequest())))
    await asyncio.wait(flood, timeout=0)
    over.set()
    await asyncio.gather(*flood)
    assert scheduler.sizes == [1, 4]
    await yard.close()


async def test_large_documents_travel_in_as_many_messages_as_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yards, "_APART_S", 0)
    scheduler = Scheduler()
    yard = Yard(cast("Connection", scheduler), 30)
    large = pb.SubmitRequest(document=pb.Document(text="x" * (MAX_MESSAGE_BYTES // 5)))
    await asyncio.gather(*(yard.submit(large) for _ in range(5)))
    assert scheduler.sizes == [2, 2, 1]
    await yard.close()
