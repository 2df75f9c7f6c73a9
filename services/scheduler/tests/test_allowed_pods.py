"""A job that asks for a priority class or toleration that no pool allows is refused when it is submitted."""

from __future__ import annotations

import grpc
import pytest
from trainyard_protos.v1 import scheduler_pb2 as s

from services.scheduler.tests.yard import Yard, document

ALLOWED = s.AllowedPods(priority_classes=["training-*"], tolerations=["gpu"])


def asking(**wishes: object) -> s.Document:
    return s.Document(text=document(kubernetes=wishes), filename="job.yaml")


async def refused(call: object, request: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as found:
        await call(request)  # type: ignore[operator]
    return found.value


async def test_every_field_is_named_with_what_is_allowed_and_where_that_is_said(yard: Yard) -> None:
    await yard.register(allowed_pods=ALLOWED)
    wrong = asking(priorityClass="system", tolerations=[{"key": "gpu"}, {"key": "other"}, {"operator": "Exists"}])
    for call, request in (
        (yard.users.Submit, s.SubmitRequest(document=wrong)),
        (yard.users.Plan, s.PlanRequest(document=wrong)),
    ):
        error = await refused(call, request)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        first, second, third = str(error.details()).splitlines()
        assert first.startswith("job.yaml: spec.kubernetes.priorityClass: 'system' is not allowed")
        assert "jobs.allowed.priorityClasses of the chart" in first
        assert first.endswith("allowed: training-*")
        assert second.startswith("job.yaml: spec.kubernetes.tolerations[1].key: 'other' is not allowed")
        assert third.startswith("job.yaml: spec.kubernetes.tolerations[2]: tolerates every taint")
    (result,) = (await yard.users.SubmitBatch(s.SubmitBatchRequest(requests=[s.SubmitRequest(document=wrong)]))).results
    assert (result.reason, len(result.problems.problems)) == ("NotAllowed", 3)
    assert not (await yard.users.ListJobs(s.ListJobsRequest())).jobs


async def test_what_one_pool_allows_is_taken(yard: Yard) -> None:
    await yard.register(allowed_pods=ALLOWED)
    await yard.users.Submit(
        s.SubmitRequest(document=asking(priorityClass="training-low", tolerations=[{"key": "gpu"}]))
    )
    await yard.register(pool="anything", launcher_id="another")
    await yard.users.Submit(s.SubmitRequest(document=asking(priorityClass="system")))


async def test_without_a_pool_the_launch_decides(yard: Yard) -> None:
    await yard.users.Submit(s.SubmitRequest(document=asking(priorityClass="system")))
