"""That somebody may read the Secrets of a job is said by the operator alone, and remembered with the job."""

from __future__ import annotations

import grpc
import pytest
from trainyard.channel import connect
from trainyard_protos.v1 import scheduler_pb2 as s
from trainyard_protos.v1.scheduler_pb2_grpc import SchedulerServiceStub

from services.scheduler.tests.conftest import OPERATOR_TOKEN
from services.scheduler.tests.yard import Yard, document

SECRETS = [{"name": "KEY", "from": {"secret": {"name": "hub", "key": "k"}}}]


def request(key: str, *, checked: bool) -> s.SubmitRequest:
    text = document(secrets=SECRETS, retries={"limit": 1, "backoff": "0s"})
    return s.SubmitRequest(document=s.Document(text=text), idempotency_key=key, secrets_checked=checked)


async def test_a_user_cannot_say_that_secrets_were_checked(yard: Yard) -> None:
    forged = request("forged", checked=True)
    calls = [yard.users.Submit, yard.users.SubmitBatch]
    for call, sent in zip(calls, [forged, s.SubmitBatchRequest(requests=[forged])], strict=True):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(sent)
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert "only the operator may say secrets_checked" in str(refused.value.details())
    assert not (await yard.users.ListJobs(s.ListJobsRequest())).jobs


async def test_the_launcher_is_told_whether_the_secrets_of_a_job_were_checked(yard: Yard) -> None:
    await yard.register()
    by_user = (await yard.users.Submit(request("by-user", checked=False))).job
    async with connect(f"127.0.0.1:{yard.port}", OPERATOR_TOKEN) as channel:
        operator = SchedulerServiceStub(channel)
        by_operator = (await operator.Submit(request("by-operator", checked=True))).job
        again = await operator.Submit(request("by-user", checked=True))
    assert (again.job.id, again.created) == (by_user.id, False)
    for job, checked in ((by_user, False), (by_operator, True)):
        claimed = await yard.claim(await yard.admitted(job.id))
        assert claimed.assignment.secrets_checked == checked
