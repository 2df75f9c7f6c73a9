"""What an attempt's token lets it do with artifacts: what its job declares and made, and nothing else."""

import grpc
from servicekit.errors import reason_of
from trainyard.artifacts import download, upload
from trainyard_protos.v1 import artifacts_pb2 as pb

from services.artifacts.tests.store_kit import refused


async def store(stub, root, name="words", kind="data", **more):
    return await upload(stub, root, workspace="default", name=name, kind=kind, **more)


async def reason(call):
    error = await refused(call)
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED
    return reason_of(error)


async def chunks(stub, version, content=None):
    hashes = [chunk.hash for file in content.files for chunk in file.chunks] if content else []
    return [message async for message in stub.GetChunks(pb.GetChunksRequest(version_id=version.id, hashes=hashes))]


async def file(stub, reference):
    return b"".join([part.data async for part in stub.ReadFile(pb.ReadFileRequest(reference=reference, path="a"))])


async def test_an_attempt_adds_to_the_outputs_of_its_job_alone(yard, tree):
    user, job = yard.user(), yard.attempt(outputs=["model"])
    await store(user, tree({"a": b"good"}), "production-model", "output", aliases=["production"])
    root = tree({"a": b"bad"})
    error = await refused(store(job, root, "production-model", "output"))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.PERMISSION_DENIED, "NotGranted")
    assert "spec.outputs" in str(error.trailing_metadata())
    assert await file(user, "production-model@production") == b"good"
    await store(job, root, "model", "output")
    for kind, name in (("checkpoint", "model"), ("output", "checkpoints-job-1"), ("checkpoint", "checkpoints-job-2")):
        request = pb.CommitRequest(name=name, kind=kind)
        assert await reason(job.Commit(request)) == "NotOwnJob"
        part = pb.CommitPartRequest(commit=request, parts=1)
        assert await reason(job.CommitPart(part)) == "NotOwnJob"


async def test_an_attempt_moves_no_alias(yard, tree):
    user, job = yard.user(), yard.attempt(outputs=["model"])
    version = await store(job, tree({"a": b"1"}), "model", "output")
    for alias in ("production", "mine"):
        assert await reason(store(job, tree({"a": b"2"}), "model", "output", aliases=[alias])) == "NotGranted"
        assert await reason(job.SetAlias(pb.SetAliasRequest(reference=version.id, alias=alias))) == "NotGranted"
    await user.SetAlias(pb.SetAliasRequest(reference=version.id, alias="production"))


async def test_an_attempt_reads_its_inputs_and_what_its_job_made(yard, tree, tmp_path):
    user = yard.user()
    words = await store(user, tree({"a": b"words"}))
    other = await store(user, tree({"a": b"by id"}), "by-id")
    job = yard.attempt(inputs=["words", other.id], outputs=["model"])
    made = await store(job, tree({"a": b"model"}), "model", "output", inputs=[words.id])
    for reference, content in (("words@1", b"words"), (other.id, b"by id"), ("model@1", b"model")):
        await download(job, reference, tmp_path / content.decode(), workspace="default")
        assert await file(job, reference) == content
        await job.ListFiles(pb.ListFilesRequest(reference=reference))
    await job.RecordUse(pb.RecordUseRequest(version_id=words.id))
    assert len((await job.ListVersions(pb.ListVersionsRequest(name="words"))).versions) == 1
    assert len((await job.ListVersions(pb.ListVersionsRequest(job_id="job-1"))).versions) == 1
    assert [each.name for each in (await job.ListArtifacts(pb.ListArtifactsRequest(job_id="job-1"))).artifacts] == [
        "model"
    ]
    of_model = await job.GetLineage(pb.GetLineageRequest(reference=made.id))
    assert [version.id for version in of_model.made_from] == [words.id]


async def test_an_attempt_reads_nothing_else(yard, tree):
    user = yard.user()
    secret = await store(user, tree({"a": b"secret"}), "secret")
    tree_of = (await user.GetVersion(pb.GetVersionRequest(reference="secret"))).manifest
    job = yard.attempt(inputs=["words"], outputs=["secret-model", "secret"])
    for reference in ("secret", "secret@1", secret.id):
        assert await reason(job.GetVersion(pb.GetVersionRequest(reference=reference))) == "NotGranted"
        assert await reason(job.ListFiles(pb.ListFilesRequest(reference=reference))) == "NotGranted"
        assert await reason(file(job, reference)) == "NotGranted"
        assert await reason(job.GetLineage(pb.GetLineageRequest(reference=reference))) == "NotGranted"
    assert await reason(chunks(job, secret, tree_of)) == "NotGranted"
    assert await reason(job.RecordUse(pb.RecordUseRequest(version_id=secret.id))) == "NotGranted"
    assert await reason(job.ListVersions(pb.ListVersionsRequest())) == "NotGranted"
    assert await reason(job.ListVersions(pb.ListVersionsRequest(name="secret"))) == "NotGranted"
    assert await reason(job.ListVersions(pb.ListVersionsRequest(job_id="job-2"))) == "NotGranted"
    assert await reason(job.ListArtifacts(pb.ListArtifactsRequest())) == "NotGranted"
    assert await reason(job.GetLineage(pb.GetLineageRequest(job_id="job-2"))) == "NotGranted"
    assert await reason(job.GetRetention(pb.GetRetentionRequest(name="secret"))) == "NotGranted"
    made_from = store(job, tree({"a": b"1"}), "secret-model", "output", inputs=[secret.id])
    assert await reason(made_from) == "NotGranted"


async def test_lineage_hides_from_an_attempt_what_it_may_not_read(yard, tree):
    user = yard.user()
    words = await store(user, tree({"a": b"words"}))
    await store(user, tree({"a": b"secret"}), "secret", inputs=[words.id])
    await user.RecordUse(pb.RecordUseRequest(version_id=words.id, consumer=pb.Producer(job_id="job-2")))
    job = yard.attempt(inputs=["words"])
    await job.RecordUse(pb.RecordUseRequest(version_id=words.id))
    found = await job.GetLineage(pb.GetLineageRequest(reference="words"))
    assert (list(found.made), [use.job_id for use in found.used_by]) == ([], ["job-1"])


async def test_a_token_of_an_older_version_uses_what_its_own_job_made_until_it_is_renewed(yard, tree):
    await store(yard.user(), tree({"a": b"words"}))
    old = yard.attempt(inputs=None)
    await store(old, tree({"a": b"1"}), "checkpoints-job-1", "checkpoint", checkpoint=pb.CheckpointInfo(step=1))
    assert await file(old, "checkpoints-job-1") == b"1"
    for call in (old.Commit(pb.CommitRequest(name="model", kind="output")), file(old, "words")):
        error = await refused(call)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "TokenTooOld")
