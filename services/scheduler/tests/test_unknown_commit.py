"""PostgreSQL commits and the answer is lost: the caller learns the truth, and memory does not fall behind the table."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from trainyard_protos.v1 import scheduler_pb2 as s

from scripts.testbed.commits import CommitRelay
from scripts.testbed.databases import Postgres
from scripts.testbed.patience import PATIENCE_S
from services.scheduler.tests.conftest import open_yard
from services.scheduler.tests.yard import COMPLETED, Yard, document

WHOLE_POOL = {"cpu": 4, "memory": "1Gi"}


@pytest.fixture
def relay(postgres_server: Postgres) -> Iterator[CommitRelay]:
    with CommitRelay(postgres_server.port) as relay:
        yield relay


@pytest.fixture
async def yard(tmp_path: Path, relay: CommitRelay, postgres_url: str) -> AsyncIterator[Yard]:
    async with open_yard(tmp_path, database_url=relay.url(postgres_url)) as opened:
        await opened.register()
        yield opened


async def test_a_submitted_job_starts(yard: Yard, relay: CommitRelay) -> None:
    relay.lose_answer()
    job = await yard.submit()
    assert relay.lost.is_set()
    assert (await yard.admitted(job.id)).state == s.JOB_STATE_STARTING


async def test_an_ended_job_holds_nothing(yard: Yard, relay: CommitRelay) -> None:
    job = await yard.started((await yard.submit(document(resources=WHOLE_POOL))).id)
    waiting = await yard.submit(document(resources=WHOLE_POOL))
    relay.lose_answer()
    await yard.report(job, s.ATTEMPT_PHASE_ENDED, COMPLETED)
    assert (await yard.job(job.id)).state == s.JOB_STATE_SUCCEEDED
    assert (await yard.admitted(waiting.id)).state == s.JOB_STATE_STARTING


async def test_an_admission_is_not_made_twice(yard: Yard, relay: CommitRelay) -> None:
    blocker = await yard.started((await yard.submit(document(resources=WHOLE_POOL))).id)
    jobs = [await yard.submit() for _ in range(2)]
    await yard.report(blocker, s.ATTEMPT_PHASE_ENDED, COMPLETED)
    relay.lose_answer()  # of the admission, or of what comes next
    for job in jobs:
        await yard.ended(job.id, COMPLETED)
    assert relay.lost.is_set()
    assert [event.type for event in await yard.events() if event.type == "Admitted"] == ["Admitted"] * 3
    assert not yard.scheduler._index.queued


async def test_a_caller_whose_deadline_passes_first_does_not_take_the_knowledge_with_it(
    yard: Yard, relay: CommitRelay
) -> None:
    relay.lose_answer(then_away=True)
    request = s.SubmitRequest(document=s.Document(text=document(), filename="job.yaml"), idempotency_key="once")
    submitting = asyncio.ensure_future(yard.users.Submit(request))
    assert await asyncio.to_thread(relay.lost.wait, PATIENCE_S)
    submitting.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await yard.submit()
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    relay.heal()
    again = await _until_taken(yard, request)
    assert not again.created
    assert (await yard.admitted(again.job.id)).state == s.JOB_STATE_STARTING


async def test_a_scheduler_stops_while_an_outcome_is_unknown(
    tmp_path: Path, relay: CommitRelay, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servicekit.writership.LEASE_S", 0.2)  # the server keeps the first one's session
    monkeypatch.setattr("servicekit.writership._RENEW_S", 0.1)
    async with open_yard(tmp_path, database_url=relay.url(postgres_url)) as yard:
        relay.lose_answer(then_away=True)
        submitting = asyncio.ensure_future(yard.submit())
        assert await asyncio.to_thread(relay.lost.wait, PATIENCE_S)
    submitting.cancel()
    relay.heal()
    async with open_yard(tmp_path, database_url=relay.url(postgres_url)) as yard:
        await yard.register()
        (job,) = (await yard.users.ListJobs(s.ListJobsRequest())).jobs
        assert (await yard.admitted(job.id)).state == s.JOB_STATE_STARTING


async def _until_taken(yard: Yard, request: s.SubmitRequest) -> s.SubmitResponse:
    """Its answer, once the database can be reached."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await yard.users.Submit(request)
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE
                await asyncio.sleep(0.05)
