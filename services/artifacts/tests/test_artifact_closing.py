"""An attempt that is over stores nothing more."""

import pytest
from blake3 import blake3
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


async def store_output(yard, tree, *, job="job-1", fence=1, name="model"):
    stub = yard.attempt(job=job, fence=fence, outputs=[name])
    content = tree({"weights": f"{job} {fence}".encode()})
    return await upload(stub, content, workspace="default", name=name, kind="output")


async def close(yard, fence=1, job="job-1", **fields):
    await yard.user().CloseAttempt(metrics_pb2.CloseAttemptRequest(job_id=job, fence=fence, **fields))


def chunk(data):
    return pb.Chunk(workspace="default", hash=blake3(data).digest(), data=data)


async def latest(yard, name="model"):
    return (await yard.user().GetVersion(pb.GetVersionRequest(reference=name))).version.number


async def numbers(yard, name="model"):
    versions = (await yard.user().ListVersions(pb.ListVersionsRequest(name=name))).versions
    return sorted(version.number for version in versions)


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


async def test_an_upload_that_is_open_stores_nothing_more_once_its_attempt_is_over(yard):
    stream = yard.attempt().PutChunks()
    await stream.write(chunk(b"before"))
    await close(yard)
    await stream.write(chunk(b"after"))
    await stream.done_writing()
    await ended(stream)
    assert not yard.stored()


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


async def test_outputs_are_the_newest_versions_once_their_attempt_has_succeeded(yard, tree):
    first = await store_output(yard, tree)
    error = await refused(latest(yard))
    assert "'model@1'" in str(error.trailing_metadata())
    assert list(first.aliases) == []
    for _ in range(2):  # the answer may get lost
        await close(yard, succeeded=True)
        assert await latest(yard) == 1
    await store_output(yard, tree, fence=2)
    assert await latest(yard) == 1
    [listed] = (await yard.user().ListArtifacts(pb.ListArtifactsRequest())).artifacts
    assert (listed.latest.number, listed.versions) == (1, 2)
    await close(yard, fence=2, succeeded=True)
    await close(yard, fence=2)
    assert await latest(yard) == 2


@pytest.mark.parametrize("closed", [True, False])
async def test_outputs_of_an_attempt_that_was_lost_are_kept_and_never_the_newest(yard, tree, closed):
    await store_output(yard, tree, job="before")
    await close(yard, job="before", succeeded=True)
    await store_output(yard, tree)
    if closed:
        await close(yard)
    else:
        await store_output(yard, tree, fence=2)
    await close(yard, succeeded=True)
    assert await latest(yard) == 1
    assert await numbers(yard) == [1, 2] if closed else [1, 2, 3]
    await yard.user().DeleteVersion(pb.DeleteVersionRequest(reference="model@1"))
    await refused(latest(yard))


async def test_of_several_jobs_the_last_one_to_succeed_has_the_newest_version(yard, tree):
    for job in ("job-1", "job-2"):
        await store_output(yard, tree, job=job)
    for job, number in (("job-2", 2), ("job-1", 1)):
        await close(yard, job=job, succeeded=True)
        assert await latest(yard) == number
    await set_rule(yard, keep_last=1)
    await yard.app.collector.collect()
    assert (await latest(yard), await numbers(yard)) == (1, [1])


async def test_retention_takes_a_lost_output_for_the_oldest_and_waits_for_one_that_may_still_succeed(yard, tree):
    await set_rule(yard, keep_last=1)
    await store_output(yard, tree, job="good")
    await close(yard, job="good", succeeded=True)
    await store_output(yard, tree, job="running")
    assert await numbers(yard) == [1, 2]
    await store_output(yard, tree, job="lost")
    await close(yard, job="lost")
    await yard.app.collector.collect()
    assert (await latest(yard), await numbers(yard)) == (1, [1, 2])
    await close(yard, job="running", succeeded=True)
    assert (await latest(yard), await numbers(yard)) == (2, [2])


async def set_rule(yard, **rule):
    await yard.user().SetRetention(pb.SetRetentionRequest(retention=pb.Retention(name="model", **rule)))


async def ended(call):
    assert reason_of(await refused(call)) == "AttemptEnded"
