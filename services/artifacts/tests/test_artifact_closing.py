"""An attempt that is over stores nothing more."""

import pytest
from servicekit.errors import reason_of
from trainyard.artifacts import upload
from trainyard_protos.v1 import artifacts_pb2 as pb
from trainyard_protos.v1 import metrics_pb2

from services.artifacts.tests.store_kit import refused


async def store(stub, tree, step, *, fence=1):
    return await upload(
        stub,
        tree({"weights": b"%d" % step}),
        workspace="default",
        name="checkpoints-job-1",
        kind="checkpoint",
        idempotency_key=f"step-{step}",
        checkpoint=pb.CheckpointInfo(step=step),
        producer=pb.Producer(job_id="job-1", fence=fence),
    )


async def close(yard, fence=1, **fields):
    await yard.user().CloseAttempt(metrics_pb2.CloseAttemptRequest(job_id="job-1", fence=fence, **fields))


async def test_the_token_of_an_attempt_that_is_over_stores_nothing(yard, tree):
    stub = yard.attempt()
    await store(stub, tree, 1)
    await close(yard)
    await ended(store(stub, tree, 2))
    await yard.stop()
    await yard.start()
    await ended(store(yard.attempt(), tree, 2))
    await store(yard.attempt(fence=2), tree, 3, fence=2)
    versions = (await yard.user().ListVersions(pb.ListVersionsRequest(name="checkpoints-job-1"))).versions
    assert sorted(version.checkpoint.step for version in versions) == [1, 3]


async def test_an_attempt_of_which_nothing_was_heard_is_closed_too(yard, tree):
    await close(yard, fence=2)
    for fence in (1, 2):
        await ended(store(yard.attempt(fence=fence), tree, 1, fence=fence))


async def test_an_attempt_closes_nothing(yard):
    error = await refused(yard.attempt().CloseAttempt(metrics_pb2.CloseAttemptRequest(job_id="job-1", fence=1)))
    assert reason_of(error) == "UserOnly"


@pytest.mark.parametrize("fields", [{"fence": 1}, {"job_id": "job-1", "fence": -1}])
async def test_what_is_no_attempt_is_not_closed(yard, fields):
    error = await refused(yard.user().CloseAttempt(metrics_pb2.CloseAttemptRequest(**fields)))
    assert reason_of(error) == "BadAttempt"


async def ended(call):
    assert reason_of(await refused(call)) == "AttemptEnded"
