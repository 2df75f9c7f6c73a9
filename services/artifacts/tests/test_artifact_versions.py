"""Versions: who may make them, what is refused, what is kept."""

import asyncio

import grpc
import pytest
from servicekit.errors import reason_of
from trainyard.artifacts import describe, download, upload, upload_part
from trainyard_protos.v1 import artifacts_pb2 as pb

from services.artifacts.tests.store_kit import refused


def info(step, *, keep_last=0, best="", mode="max", **metrics):
    return pb.CheckpointInfo(
        step=step, keep_last=keep_last, best_metric=best, best_mode=mode if best else "", metrics=metrics
    )


async def checkpoint(stub, root, step, *, name="checkpoints-job-1", **rule):
    return await upload(stub, root, workspace="default", name=name, kind="checkpoint", checkpoint=info(step, **rule))


async def numbers(stub, **query):
    return [version.number for version in (await stub.ListVersions(pb.ListVersionsRequest(**query))).versions]


async def steps(stub):
    return [version.checkpoint.step for version in (await stub.ListVersions(pb.ListVersionsRequest())).versions]


async def test_a_version_is_found_by_name_alias_number_and_id(yard, tree):
    stub = yard.user()
    first = await upload(stub, tree({"a": b"1"}), workspace="default", name="m", kind="data", aliases=["best"])
    second = await upload(stub, tree({"a": b"2"}), workspace="default", name="m", kind="data")
    found = {"m": 2, "m@latest": 2, "m@best": 1, "m@1": 1, "m@v2": 2, first.id: 1, second.id: 2}
    for reference, number in found.items():
        detail = await stub.GetVersion(pb.GetVersionRequest(reference=reference, without_manifest=True))
        assert detail.version.number == number
        assert not detail.manifest.files
    assert (await refused(stub.GetVersion(pb.GetVersionRequest(reference="m@9")))).code() == grpc.StatusCode.NOT_FOUND


async def test_names_that_could_be_anything_else_are_refused(yard, tree):
    root = tree({"a": b"1"})
    for name in ("", "..", "../x", "a/b", "A", ".a", "a" * 129, "a\n", "a@b", "a b"):
        error = await refused(upload(yard.user(), root, workspace="default", name=name, kind="data"))
        assert reason_of(error) == "BadName"
    for workspace in ("..", "a/b", "A", "x" * 64):
        error = await refused(upload(yard.user(), root, workspace=workspace, name="m", kind="data"))
        assert reason_of(error) == "BadWorkspace"
    for alias in ("v3", "7", "", "a/b"):
        error = await refused(upload(yard.user(), root, workspace="default", name="m", kind="data", aliases=[alias]))
        assert reason_of(error) == "BadAlias"


async def test_a_repeated_commit_gives_the_same_version(yard, tree):
    root = tree({"a": b"1"})
    fields = {"workspace": "default", "name": "m", "kind": "data", "idempotency_key": "key"}
    first = await upload(yard.user(), root, **fields)
    assert await upload(yard.user(), root, **fields) == first
    error = await refused(upload(yard.user(), tree({"a": b"2"}), **fields))
    assert reason_of(error) == "IdempotencyKeyReused"


async def test_versions_that_were_deleted_are_listed_apart(yard, tree):
    user, root = yard.user(), tree({"a": b"1"})
    made = [await upload(user, root, workspace="default", name="m", kind="data") for _ in range(3)]
    deleted = []
    for version in made[:2]:
        await user.DeleteVersion(pb.DeleteVersionRequest(reference=version.id))
        answer = await user.ListVersions(pb.ListVersionsRequest(name="m", deleted_since_ns=1))
        deleted.append(max(each.deleted_ns for each in answer.versions))
    assert await numbers(user, name="m") == [3]
    assert await numbers(user, name="m", deleted_since_ns=deleted[0]) == [2, 1]
    assert await numbers(user, name="m", deleted_since_ns=deleted[1]) == [2]


async def test_a_repeated_commit_does_not_bring_back_what_was_deleted(yard, tree):
    root = tree({"a": b"1"})
    fields = {"workspace": "default", "name": "m", "kind": "data", "idempotency_key": "key"}
    first = await upload(yard.user(), root, **fields)
    await yard.user().DeleteVersion(pb.DeleteVersionRequest(reference="m"))
    await upload(yard.user(), root, **fields)
    assert await numbers(yard.user()) == []
    assert (await upload(yard.user(), root, workspace="default", name="m", kind="data")).number == first.number + 1


async def code(stub, root, **fields):
    return await upload(stub, root, workspace="default", name="m-code", kind="code", **fields)


async def test_identical_code_makes_no_second_version(yard, tree):
    stub = yard.user()
    first, other = tree({"a": b"1"}), tree({"a": b"2"})
    assert (await code(stub, first, labels={"git.commit": "a", "git.diff": "d@1"})).number == 1
    assert (await code(stub, other)).number == 2
    again = await code(stub, first, labels={"git.commit": "b"}, aliases=["kept"])
    assert (again.number, dict(again.labels), list(again.aliases)) == (1, {"git.commit": "b"}, ["kept", "latest"])
    assert dict((await code(stub, first)).labels) == {"git.commit": "b"}
    assert sorted(await numbers(stub)) == [1, 2]
    versions = await asyncio.gather(*(code(stub, tree({"a": b"3"})) for _ in range(5)))
    assert {version.number for version in versions} == {3}
    renamed = await code(stub, tree({"b": b"3"}))
    assert renamed.number == 4


async def test_code_that_is_stored_again_is_kept_as_the_newest(yard, tree):
    stub = yard.user()
    await stub.SetRetention(pb.SetRetentionRequest(retention=pb.Retention(name="m-code", keep_last=2)))
    first = tree({"a": b"1"})
    for root in (first, tree({"a": b"2"}), first, tree({"a": b"3"})):
        await code(stub, root)
    assert sorted(await numbers(stub)) == [1, 3]
    await yard.sql("UPDATE artifact_version SET created_ns = created_ns - :ns", ns=int(10 * 86400e9))
    await stub.SetRetention(pb.SetRetentionRequest(retention=pb.Retention(name="m-code", ttl_s=86400)))
    assert (await code(stub, first)).number == 1
    assert await numbers(stub) == [1]
    await stub.DeleteVersion(pb.DeleteVersionRequest(reference="m-code@1"))
    assert (await code(stub, first)).number == 4


async def test_results_may_repeat(yard, tree):
    root = tree({"a": b"1"})
    for number in (1, 2):
        assert (await upload(yard.user(), root, workspace="default", name="m", kind="output")).number == number


async def test_commits_at_once_get_numbers_of_their_own(yard, tree):
    roots = [tree({"a": bytes([index])}) for index in range(20)]
    versions = await asyncio.gather(
        *(upload(yard.user(), root, workspace="default", name="m", kind="data") for root in roots)
    )
    assert sorted(version.number for version in versions) == list(range(1, 21))


async def test_a_commit_needs_its_chunks_in_its_own_workspace(yard, tree):
    root = tree({"secret": b"known only by its hash"})
    await upload(yard.user(), root, workspace="theirs", name="m", kind="data")
    request = pb.CommitRequest(workspace="mine", name="m", kind="data", manifest=await describe(root))
    error = await refused(yard.user().Commit(request))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "ChunkMissing")
    assert "'secret'" in error.details()


async def test_chunks_are_read_through_a_version_that_holds_them(yard, tree):
    stub = yard.user()
    mine = await upload(stub, tree({"a": b"1"}), workspace="default", name="a", kind="data")
    other = tree({"b": b"2"})
    await upload(stub, other, workspace="default", name="b", kind="data")
    hashes = [(await describe(other)).files[0].chunks[0].hash]
    error = await refused(anext(aiter(stub.GetChunks(pb.GetChunksRequest(version_id=mine.id, hashes=hashes)))))
    assert reason_of(error) == "ChunkNotFound"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "..",
        "../x",
        "a/../../x",
        "a//b",
        "./a",
        "a/.",
        "a/",
        "a\\..\\b",
        "a\0b",
        "a\nb",
        "x" * 300,
        "a/" * 3000,
    ],
)
async def test_paths_that_could_leave_the_tree_are_refused(yard, path):
    request = pb.CommitRequest(name="m", kind="data", manifest=pb.Manifest(files=[pb.File(path=path)]))
    error = await refused(yard.user().Commit(request))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "UnsafePath")


@pytest.mark.parametrize("target", ["/etc", "../..", "a/../../b", "b/..", "x\\y", "a//b", "../../d/link"])
async def test_links_that_could_leave_the_tree_are_refused(yard, target):
    files = [pb.File(path="d/link", symlink=target)]
    request = pb.CommitRequest(name="m", kind="data", manifest=pb.Manifest(files=files))
    assert reason_of(await refused(yard.user().Commit(request))) == "UnsafePath"


@pytest.mark.parametrize(
    "files",
    [
        [pb.File(path="a"), pb.File(path="a")],
        [pb.File(path="b"), pb.File(path="a")],
        [pb.File(path="a", symlink="c"), pb.File(path="a/b")],
        [pb.File(path="a", mode=0o4755)],
        [pb.File(path="a", size=3)],
        [pb.File(path="a", size=3, chunks=[pb.ChunkRef(hash=b"short", size=3)])],
        [pb.File(path="a", symlink="b", size=1)],
    ],
)
async def test_manifests_that_contradict_themselves_are_refused(yard, files):
    request = pb.CommitRequest(name="m", kind="data", manifest=pb.Manifest(files=files))
    assert reason_of(await refused(yard.user().Commit(request))) == "BadManifest"


async def test_an_artifact_holds_one_kind(yard, tree):
    root = tree({"a": b"1"})
    await upload(yard.user(), root, workspace="default", name="m", kind="data")
    error = await refused(upload(yard.user(), root, workspace="default", name="m", kind="output"))
    assert reason_of(error) == "KindMismatch"


async def test_a_zombie_attempt_cannot_commit_once_the_next_one_has_called(yard, tree):
    root = tree({"a": b"1"})
    await checkpoint(yard.attempt(fence=1), root, 1)
    await yard.attempt(fence=2).ListVersions(pb.ListVersionsRequest(job_id="job-1"))
    error = await refused(checkpoint(yard.attempt(fence=1), root, 2))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "StaleFence")
    assert await numbers(yard.user(), job_id="job-1") == [1]


async def test_an_attempt_cannot_add_to_another_jobs_checkpoints(yard, tree):
    root = tree({"a": b"1"})
    await checkpoint(yard.attempt(job="job-1"), root, 1, name="checkpoints-job-1")
    thief = yard.attempt(job="job-2")
    error = await refused(checkpoint(thief, root, 99, name="checkpoints-job-1"))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.PERMISSION_DENIED, "NotOwnJob")
    squat = upload(thief, root, workspace="default", name="checkpoints-job-3", kind="output")
    assert reason_of(await refused(squat)) == "NotOwnJob"
    assert await numbers(yard.user(), name="checkpoints-job-1") == [1]


async def test_an_attempt_neither_takes_nor_meets_an_idempotency_key_of_another_job(yard, tree):
    mine, theirs = [
        await upload(
            yard.attempt(job=job, outputs=[job]),
            tree({"a": content}),
            workspace="default",
            name=job,
            kind="output",
            idempotency_key="k",
        )
        for job, content in (("job-1", b"1"), ("job-2", b"2"))
    ]
    assert mine.id != theirs.id
    assert (mine.producer.job_id, theirs.producer.job_id) == ("job-1", "job-2")


async def test_fences_survive_a_restart(yard, tree):
    await yard.attempt(fence=2).ListVersions(pb.ListVersionsRequest(job_id="job-1"))
    await yard.stop()
    await yard.start()
    assert reason_of(await refused(checkpoint(yard.attempt(fence=1), tree({"a": b"1"}), 1))) == "StaleFence"


async def test_an_attempt_makes_checkpoints_and_outputs_of_its_own_job_alone(yard, tree):
    root = tree({"a": b"1"})
    error = await refused(upload(yard.attempt(), root, workspace="default", name="m", kind="code"))
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED
    other = pb.Producer(job_id="job-2")
    own = yard.attempt(outputs=["m"])
    error = await refused(upload(own, root, workspace="default", name="m", kind="output", producer=other))
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED
    error = await refused(upload(own, root, workspace="other", name="m", kind="output"))
    assert reason_of(error) == "WrongWorkspace"
    version = await upload(own, root, workspace="default", name="m", kind="output")
    assert (version.producer.job_id, version.producer.fence) == ("job-1", 1)
    deletion = yard.attempt().DeleteVersion(pb.DeleteVersionRequest(reference="m"))
    assert reason_of(await refused(deletion)) == "UserOnly"


async def test_the_newest_the_best_and_the_pinned_checkpoints_are_kept(yard, tree):
    stub = yard.attempt()
    for step, accuracy in enumerate([0.1, 0.9, 0.5, float("nan"), 0.3, 0.2], start=1):
        await checkpoint(stub, tree({"a": bytes([step])}), step, keep_last=2, best="acc", acc=accuracy)
        if step == 1:
            await yard.user().SetAlias(pb.SetAliasRequest(reference="checkpoints-job-1", alias="start"))
    assert await numbers(yard.user(), job_id="job-1") == [6, 5, 2, 1]


async def best(yard):
    """The step of the checkpoint that "best" points to."""
    found = await yard.user().GetVersion(pb.GetVersionRequest(reference="checkpoints-job-1@best"))
    assert "best" in found.version.aliases
    return found.version.checkpoint.step


async def test_best_moves_when_a_better_checkpoint_is_stored_and_is_never_removed_by_a_rule(yard, tree):
    for step, accuracy, found in (
        (1, float("nan"), None),
        (2, 0.5, 2),
        (3, 0.9, 3),
        (4, 0.7, 3),
        (5, 0.9, 5),
        (6, 0.1, 5),
    ):
        await checkpoint(yard.attempt(), tree({"a": bytes([step])}), step, keep_last=1, best="acc", acc=accuracy)
        if found is None:
            error = await refused(best(yard))
            assert (reason_of(error), "finite value of 'acc'" in str(error.trailing_metadata())) == (
                "VersionNotFound",
                True,
            )
        else:
            assert await best(yard) == found
    assert await steps(yard.user()) == [6, 5]


async def test_the_least_value_is_best_where_the_job_says_so_and_infinity_is_no_value(yard, tree):
    await checkpoint(yard.attempt(), tree({"a": b"0"}), 1, best="loss", mode="min", loss=float("-inf"))
    assert "finite value of 'loss'" in str((await refused(best(yard))).trailing_metadata())
    for step, loss, found in ((2, 0.5, 2), (3, 0.9, 2), (4, float("-inf"), 2), (5, 0.1, 5)):
        await checkpoint(yard.attempt(), tree({"a": bytes([step])}), step, best="loss", mode="min", loss=loss)
        assert await best(yard) == found


async def test_a_job_without_a_metric_has_no_best_and_the_refusal_names_the_field(yard, tree):
    await checkpoint(yard.attempt(), tree({"a": b"1"}), 1, acc=0.5)
    told = str((await refused(best(yard))).trailing_metadata())
    assert "the job names no metric for it; 'spec.checkpoints.keep.best' does" in told


async def test_best_survives_a_retry_that_resumes_with_a_worse_value(yard, tree):
    rule = {"keep_last": 1, "best": "acc"}
    for fence, step, accuracy in ((1, 10, 0.8), (1, 20, 0.6), (2, 15, 0.1), (2, 25, 0.7)):
        await checkpoint(yard.attempt(fence=fence), tree({"a": bytes([step])}), step, acc=accuracy, **rule)
        assert await best(yard) == 10
    await yard.stop()
    await yard.start()
    await checkpoint(yard.attempt(fence=3), tree({"a": b"3"}), 30, acc=0.95, **rule)
    assert await best(yard) == 30


async def test_a_rule_of_a_user_does_not_remove_the_best_and_a_user_who_does_moves_the_alias(yard, tree):
    user, name = yard.user(), "checkpoints-job-1"
    await user.SetRetention(pb.SetRetentionRequest(retention=pb.Retention(name=name, keep_last=2)))
    for step, accuracy in ((1, 0.9), (2, 0.1), (3, 0.2)):
        await checkpoint(yard.attempt(), tree({"a": bytes([step])}), step, best="acc", acc=accuracy)
    assert await steps(user) == [3, 2, 1]
    await user.DeleteVersion(pb.DeleteVersionRequest(reference=f"{name}@best"))
    assert await best(yard) == 3
    for reference in ("2", "best"):
        await user.DeleteVersion(pb.DeleteVersionRequest(reference=f"{name}@{reference}"))
    assert reason_of(await refused(best(yard))) == "VersionNotFound"


async def test_nobody_moves_the_best_of_a_job_that_names_a_metric(yard, tree):
    user = yard.user()
    await checkpoint(yard.attempt(), tree({"a": b"1"}), 1, best="acc", acc=0.1)
    moved = user.SetAlias(pb.SetAliasRequest(reference="checkpoints-job-1", alias="best"))
    assert reason_of(await refused(moved)) == "BadAlias"
    await checkpoint(yard.attempt(job="job-2"), tree({"a": b"1"}), 1, name="checkpoints-job-2")
    await user.SetAlias(pb.SetAliasRequest(reference="checkpoints-job-2", alias="best"))


async def test_the_parts_of_a_checkpoint_become_the_best_together(yard, tree):
    stub, root = yard.attempt(), tree({"a": b"1", "b": b"2"})
    for part, file in enumerate(("a", "b")):
        await upload_part(
            stub,
            root,
            [root / file],
            part=part,
            parts=2,
            workspace="default",
            name="checkpoints-job-1",
            kind="checkpoint",
            idempotency_key="c",
            checkpoint=info(7, best="acc", **({"acc": 0.5} if part == 0 else {})),
        )
    assert await best(yard) == 7


async def test_an_older_step_that_arrives_late_displaces_no_newer_one_of_its_attempt(yard, tree):
    stub, user = yard.attempt(fence=1), yard.user()
    for step in (11, 12, 9):
        await checkpoint(stub, tree({"a": bytes([step])}), step, keep_last=2)
    assert await steps(user) == [12, 11]
    assert (await user.GetVersion(pb.GetVersionRequest(reference="checkpoints-job-1"))).version.checkpoint.step == 12
    await user.DeleteVersion(pb.DeleteVersionRequest(reference="checkpoints-job-1"))
    assert (await user.GetVersion(pb.GetVersionRequest(reference="checkpoints-job-1"))).version.checkpoint.step == 11


async def test_latest_stays_at_the_newest_step_when_an_older_one_that_arrives_late_is_kept(yard, tree):
    for step in (12, 9):
        await checkpoint(yard.attempt(fence=1), tree({"a": bytes([step])}), step)
    latest = await yard.user().GetVersion(pb.GetVersionRequest(reference="checkpoints-job-1@latest"))
    assert latest.version.checkpoint.step == 12


async def test_a_later_attempt_may_begin_again_at_an_older_step(yard, tree):
    await checkpoint(yard.attempt(fence=1), tree({"a": b"1"}), 12, keep_last=1)
    await checkpoint(yard.attempt(fence=2), tree({"a": b"2"}), 3, keep_last=1)
    assert await steps(yard.user()) == [3]
    latest = await yard.user().GetVersion(pb.GetVersionRequest(reference="checkpoints-job-1"))
    assert latest.version.checkpoint.step == 3


async def test_checkpoints_without_a_rule_are_all_kept(yard, tree):
    for step in range(4):
        await checkpoint(yard.attempt(), tree({"a": bytes([step])}), step)
    assert await numbers(yard.user()) == [4, 3, 2, 1]


async def test_a_version_appears_when_all_nodes_parts_are_there(yard, tree, tmp_path):
    def part(index, files, cut):
        return upload_part(
            yard.attempt(),
            tree(files),
            part=index,
            parts=2,
            workspace="default",
            name="checkpoints-job-1",
            kind="checkpoint",
            idempotency_key="job-1/7",
            checkpoint=pb.CheckpointInfo(step=7, cut=cut),
        )

    shared = {"meta": b"same on both"}
    assert await part(1, {"rank1": b"1", **shared}, {"w1": 5}) is None
    assert await part(1, {"rank1": b"1", **shared}, {"w1": 5}) is None
    assert await numbers(yard.user()) == []
    version = await part(0, {"rank0": b"0", **shared}, {"w0": 4})
    assert (version.files, dict(version.checkpoint.cut)) == (3, {"w0": 4, "w1": 5})
    assert await part(0, {"rank0": b"0", **shared}, {"w0": 4}) == version
    await download(yard.user(), "checkpoints-job-1", tmp_path / "out", workspace="default")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["meta", "rank0", "rank1"]


async def test_parts_that_disagree_are_refused(yard, tree):
    def part(index, content, parts=2):
        return upload_part(
            yard.attempt(outputs=["m"]),
            tree({"same": content}),
            part=index,
            parts=parts,
            workspace="default",
            name="m",
            kind="output",
            idempotency_key="key",
        )

    await part(0, b"one")
    assert reason_of(await refused(part(1, b"two"))) == "PartsConflict"
    assert reason_of(await refused(part(1, b"one", parts=3))) == "PartsConflict"
    assert reason_of(await refused(part(2, b"one"))) == "BadPart"
    assert (await part(1, b"one")).files == 1


async def test_latest_follows_deletion(yard, tree):
    for content in (b"1", b"2"):
        await upload(yard.user(), tree({"a": content}), workspace="default", name="m", kind="data")
    await yard.user().DeleteVersion(pb.DeleteVersionRequest(reference="m@2"))
    assert (await yard.user().GetVersion(pb.GetVersionRequest(reference="m"))).version.number == 1


async def test_lists_come_in_pages_and_by_job_and_kind(yard, tree):
    for step in range(5):
        await checkpoint(yard.attempt(), tree({"a": bytes([step])}), step)
    await upload(yard.user(), tree({"a": b"x"}), workspace="default", name="other", kind="data")
    seen, token = [], ""
    while True:
        request = pb.ListVersionsRequest(job_id="job-1", page_size=2, page_token=token)
        page = await yard.user().ListVersions(request)
        seen += [version.number for version in page.versions]
        if not (token := page.next_page_token):
            break
    assert seen == [5, 4, 3, 2, 1]
    listed = (await yard.user().ListArtifacts(pb.ListArtifactsRequest())).artifacts
    assert [(found.name, found.kind, found.versions, found.latest.number) for found in listed] == [
        ("checkpoints-job-1", "checkpoint", 5, 5),
        ("other", "data", 1, 1),
    ]
    assert await numbers(yard.user(), kind="data") == [1]


async def test_calls_are_bounded(yard):
    request = pb.FindMissingRequest(hashes=[bytes(32)] * 10_001)
    assert reason_of(await refused(yard.user().FindMissing(request))) == "TooManyHashes"

    async def huge():
        yield pb.Chunk(workspace="default", hash=bytes(32), data=bytes(4 * 1024 * 1024 + 1))

    assert reason_of(await refused(yard.user().PutChunks(huge()))) == "BadChunk"


async def test_a_damaged_manifest_is_never_served(yard, tree):
    await upload(yard.user(), tree({"a": b"1"}), workspace="default", name="m", kind="data")
    await yard.sql("UPDATE artifact_manifest SET content = :content", content=pb.Manifest().SerializeToString())
    error = await refused(yard.user().GetVersion(pb.GetVersionRequest(reference="m")))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.DATA_LOSS, "ManifestDamaged")


@pytest.mark.parametrize("rule", [{"keep_last": 1, "best_mode": "sideways"}, {"keep_last": -1}])
async def test_a_checkpoint_with_a_rule_that_means_nothing_is_refused(yard, rule):
    request = pb.CommitRequest(name="checkpoints-job-1", kind="checkpoint", checkpoint=pb.CheckpointInfo(**rule))
    error = await refused(yard.attempt().Commit(request))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "BadCheckpoint")


async def test_a_version_has_a_bounded_number_of_aliases(yard):
    request = pb.CommitRequest(name="a", kind="data", aliases=[f"alias-{number}" for number in range(65)])
    assert reason_of(await refused(yard.user().Commit(request))) == "TooLarge"


async def test_a_version_claims_no_more_than_a_bound_however_little_was_sent(yard):
    """One chunk, named often enough in one file."""
    times = 512 * 1024**3 // (4 * 1024**2) + 1
    chunk = pb.ChunkRef(hash=bytes(32), size=4 * 1024**2)
    file = pb.File(path="huge", size=times * chunk.size, mode=0o644, chunks=[chunk] * times)
    commit = pb.CommitRequest(name="huge", kind="data", manifest=pb.Manifest(files=[file]))
    error = await refused(yard.user().Commit(commit))
    assert (reason_of(error), "549,760,008,192 bytes" in error.details()) == ("TooLarge", True)


async def test_files_of_a_version_are_counted_before_anything_is_worked_out_from_them(yard):
    """Their sizes, for instance, which would be too large as well."""
    files = [pb.File(path="", size=2**60)] * 100_001
    commit = pb.CommitRequest(name="many", kind="data", manifest=pb.Manifest(files=files))
    error = await refused(yard.user().Commit(commit))
    assert (reason_of(error), "100,001 files" in error.details()) == ("BadManifest", True)


async def test_the_names_of_jobs_are_bounded(yard):
    request = pb.CommitRequest(name="a", kind="data", producer=pb.Producer(job_id="x" * 129))
    assert reason_of(await refused(yard.user().Commit(request))) == "BadProducer"
