"""A resource is one operator's, however many watch it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import pytest
from trainyard.cluster import Api, ApiError
from trainyard.errors import NotFound
from trainyard_operator.announcer import Announcer
from trainyard_operator.controller import Controller
from trainyard_operator.queue import Later
from trainyard_operator.resource import FINALIZER, OPERATOR, read
from trainyard_operator.settings import Settings
from trainyard_operator.yard import Yard
from trainyard_protos.v1 import scheduler_pb2 as pb


class Stored:
    """The API server's one resource: it refuses what was written without knowledge of its newest state."""

    def __init__(self, **metadata: Any) -> None:
        self.metadata: dict[str, Any] = {"name": "a", "namespace": "team", "uid": "u-1", "resourceVersion": "1"}
        self.metadata |= metadata
        self.status: dict[str, Any] = {}
        self.patches = 0

    @property
    def body(self) -> dict[str, Any]:
        said = {"metadata": dict(self.metadata), "spec": {"command": ["true"]}, "status": dict(self.status)}
        return {"apiVersion": "trainyard.dev/v1alpha1", "kind": "TrainingJob"} | said

    async def patch(self, path: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        known = patch["metadata"].get("resourceVersion", self.metadata["resourceVersion"])
        if known != self.metadata["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        self.patches += 1
        self.status |= patch.get("status", {})
        self.change(**patch["metadata"])
        return self.body

    def change(self, **metadata: Any) -> None:
        self.metadata |= metadata | {"resourceVersion": str(int(self.metadata["resourceVersion"]) + 1)}


class Submitted:
    """A yard: it knows the jobs that it was given."""

    def __init__(self, name: str) -> None:
        self._id = f"job-of-{name}"
        self.jobs: dict[str, pb.Job] = {}

    async def submit(self, request: pb.SubmitRequest) -> pb.SubmitResponse:
        job = self.jobs[self._id] = pb.Job(id=self._id, state=pb.JOB_STATE_RUNNING, event_seq=1)
        return pb.SubmitResponse(job=job, created=True)

    async def job(self, job_id: str) -> pb.Job:
        if job_id not in self.jobs:
            raise NotFound("there is no such job")
        return self.jobs[job_id]

    async def events(self, job_id: str, after_seq: int) -> AsyncIterator[pb.Event]:
        for event in ():
            yield event


class Operator:
    """One of those that watch the resource; nothing of its queue runs by itself."""

    def __init__(self, name: str, stored: Stored) -> None:
        self._stored, self.yard = stored, Submitted(name)
        api = cast("Api", stored)
        self.controller = Controller(api, cast("Yard", self.yard), Announcer(api), Settings(identity=name))

    def sees(self) -> None:
        self.controller.seen(read(self._stored.body))

    async def works(self) -> None:
        await self.controller._reconcile("u-1")


def pair(stored: Stored) -> tuple[Operator, Operator]:
    return Operator("first", stored), Operator("second", stored)


async def test_of_two_operators_that_see_a_resource_one_submits_it() -> None:
    stored = Stored()
    first, second = pair(stored)
    first.sees()
    second.sees()
    await first.works()
    with pytest.raises(Later):
        await second.works()
    second.sees()
    await second.works()
    assert (len(first.yard.jobs), len(second.yard.jobs)) == (1, 0)
    assert stored.metadata["annotations"] == {OPERATOR: "first/u-1"}


async def test_taking_a_resource_takes_no_request_of_its_own() -> None:
    stored = Stored()
    operator = Operator("only", stored)
    operator.sees()
    await operator.works()
    assert stored.status["jobId"] == "job-of-only"
    assert stored.patches == 2  # finalizer with name, status


async def test_what_another_took_is_left_alone_until_it_is_gone() -> None:
    stored = Stored(finalizers=[FINALIZER], annotations={OPERATOR: "first/u-1"})
    second = Operator("second", stored)
    second.sees()
    stored.status = {"jobId": "job-of-first", "phase": "Running"}
    stored.change(deletionTimestamp="t")
    second.sees()
    await second.works()
    assert (stored.patches, len(second.controller.roster)) == (0, 0)


async def test_a_copy_of_a_resource_is_nobodys_yet() -> None:
    stored = Stored(finalizers=[FINALIZER], annotations={OPERATOR: "first/u-0"})
    second = Operator("second", stored)
    second.sees()
    await second.works()
    assert list(second.yard.jobs) == ["job-of-second"]
    assert stored.metadata["annotations"] == {OPERATOR: "second/u-1"}


async def test_a_resource_that_was_replaced_is_taken_again_by_the_one_whose_yard_has_its_job() -> None:
    stored = Stored()
    first, second = pair(stored)
    first.sees()
    await first.works()
    stored.change(finalizers=[], annotations={})  # what `kubectl replace` of the file that was applied makes of it
    for operator in (second, first):
        operator.sees()
        await operator.works()
    assert (stored.metadata["finalizers"], stored.metadata["annotations"]) == ([FINALIZER], {OPERATOR: "first/u-1"})
    assert stored.status["phase"] == "Running"
    assert len(second.controller.roster) == 0
