"""Single files, lineage, retention."""

import grpc
import pytest
from servicekit.errors import reason_of
from trainyard.artifacts import upload
from trainyard_artifacts.settings import Settings
from trainyard_protos.v1 import artifacts_pb2 as pb

from services.artifacts.tests.store_kit import Yard, noise, refused

MIB = 1024 * 1024


async def store(yard, root, name="m", **fields):
    return await upload(yard.user(), root, workspace="default", name=name, kind="data", **fields)


async def read(stub, path, offset=0, length=0, reference="m"):
    request = pb.ReadFileRequest(reference=reference, path=path, offset=offset, length=length)
    return b"".join([message.data async for message in stub.ReadFile(request)])


async def test_files_are_listed_in_pages_by_prefix(yard, tree):
    await store(yard, tree({"a": b"1", "b/x": b"22", "b/y": b"", "ba": b"3", "c": b"4"}))
    page = await yard.user().ListFiles(pb.ListFilesRequest(reference="m", prefix="b", page_size=2))
    assert [(file.path, file.size) for file in page.files] == [("b/x", 2), ("b/y", 0)]
    request = pb.ListFilesRequest(reference="m", prefix="b", page_size=2, page_token=page.next_page_token)
    rest = await yard.user().ListFiles(request)
    assert ([file.path for file in rest.files], rest.next_page_token) == (["ba"], "")
    assert not any(file.chunks for file in page.files)


async def test_a_range_of_a_file_is_read_without_the_rest(yard, tree):
    data = noise(9 * MIB)
    await store(yard, tree({"big": data, "other": noise(5000, 1)}))
    assert await read(yard.user(), "big") == data
    for offset, length in ((0, 1), (3 * MIB - 5, 10), (9 * MIB - 1, 1), (7 * MIB, 100 * MIB), (9 * MIB, 5)):
        assert await read(yard.user(), "big", offset, length) == data[offset : offset + length]
    sent = yard.app.registry.get_sample_value("trainyard_artifact_sent_bytes_total")
    await read(yard.user(), "big", 5 * MIB, 10)
    assert yard.app.registry.get_sample_value("trainyard_artifact_sent_bytes_total") - sent <= 4 * MIB


async def test_an_empty_file_is_read_as_nothing_and_a_link_as_its_target(yard, tree):
    root = tree({"d/real": b"content", "empty": b""})
    (root / "link").symlink_to("d/real")
    (root / "loop").symlink_to("loop")
    await store(yard, root)
    assert await read(yard.user(), "empty") == b""
    assert await read(yard.user(), "link") == b"content"
    assert reason_of(await refused(read(yard.user(), "loop"))) == "LinkLoop"


@pytest.mark.parametrize(
    ("path", "offset", "reason"), [("b", 0, "FileNotFound"), ("d", 0, "FileNotFound"), ("a", 3, "BadRange")]
)
async def test_what_cannot_be_read_is_told(yard, tree, path, offset, reason):
    await store(yard, tree({"a": b"12", "d/x": b"1"}))
    assert reason_of(await refused(read(yard.user(), path, offset))) == reason


async def test_a_file_of_another_workspace_is_not_found(yard, tree):
    await upload(yard.user(), tree({"a": b"1"}), workspace="theirs", name="m", kind="data")
    assert (await refused(read(yard.user(), "a"))).code() == grpc.StatusCode.NOT_FOUND


async def use(stub, version, **consumer):
    await stub.RecordUse(pb.RecordUseRequest(version_id=version.id, consumer=pb.Producer(**consumer)))


async def lineage(yard, **of):
    return await yard.user().GetLineage(pb.GetLineageRequest(**of))


async def test_lineage_goes_both_ways_and_survives_deletion(yard, tree):
    data = await store(yard, tree({"a": b"data"}), "data")
    job = yard.attempt(job="job-1", inputs=["data"], outputs=["model"])
    for _ in range(2):
        await use(job, data)
    made = await upload(job, tree({"a": b"model"}), workspace="default", name="model", kind="output", inputs=[data.id])
    await yard.user().DeleteVersion(pb.DeleteVersionRequest(reference="data"))
    await yard.user().DeleteVersion(pb.DeleteVersionRequest(reference="model@1"))

    of_data = await lineage(yard, reference=data.id)
    assert [version.id for version in of_data.made] == [made.id]
    assert [(user.job_id, user.attempt_id, user.fence) for user in of_data.used_by] == [("job-1", "job-1-1", 1)]
    of_model = await lineage(yard, reference="model@1")
    assert [version.id for version in of_model.made_from] == [data.id]
    assert of_model.made_from[0].deleted_ns > 0
    assert of_model.made_by.job_id == "job-1"
    of_job = await lineage(yard, job_id="job-1")
    assert [version.id for version in of_job.made_from] == [data.id]
    assert [version.id for version in of_job.made] == [made.id]


async def test_a_use_says_whose_it_is(yard, tree):
    version = await store(yard, tree({"a": b"1"}))
    assert reason_of(await refused(use(yard.user(), version))) == "BadConsumer"
    assert reason_of(await refused(use(yard.attempt(job="job-1"), version, job_id="job-2"))) == "NotOwnJob"
    await use(yard.user(), version, job_id="by-hand")
    assert [user.job_id for user in (await lineage(yard, reference="m")).used_by] == ["by-hand"]


async def numbers(yard, name="m"):
    response = await yard.user().ListVersions(pb.ListVersionsRequest(name=name))
    return [version.number for version in response.versions]


async def retain(yard, **rule):
    return await yard.user().SetRetention(pb.SetRetentionRequest(retention=pb.Retention(**{"name": "m"} | rule)))


async def test_metrics_of_a_version_come_back(yard, tree):
    metrics = {"loss": 0.5, "nan": float("nan"), "inf": float("-inf")}
    version = await store(yard, tree({"a": b"1"}), metrics=metrics)
    assert str(dict(sorted(version.metrics.items()))) == str(dict(sorted(metrics.items())))


async def test_a_rule_of_its_own_keeps_the_newest_the_best_and_the_pinned(yard, tree):
    await retain(yard, keep_last=1, keep_best=2, best_metric="loss", best_mode="min")
    for number, loss in enumerate([0.4, 0.1, 0.3, 0.2, float("nan"), 0.9, 0.8], start=1):
        await store(
            yard, tree({"a": bytes([number])}), metrics={"loss": loss}, aliases=["first"] if number == 1 else []
        )
    assert await numbers(yard) == [7, 4, 2, 1]


async def test_versions_grow_too_old_but_the_newest_checkpoint_of_a_job_stays(yard, tree):
    facts = {"workspace": "default", "name": "checkpoints-job-1", "kind": "checkpoint"}
    for step in range(3):
        await upload(yard.attempt(), tree({"a": bytes([step])}), checkpoint=pb.CheckpointInfo(step=step), **facts)
    await retain(yard, name="checkpoints-job-1", ttl_s=3600)
    await yard.sql("UPDATE artifact_version SET created_ns = created_ns - :ns", ns=int(7200e9))
    assert (await yard.app.collector.collect()).versions == 2
    assert await numbers(yard, "checkpoints-job-1") == [3]


async def test_parts_of_a_rule_add_up(yard, tree):
    await retain(yard, keep_last=1, ttl_s=3600)
    for number in range(3):
        await store(yard, tree({"a": bytes([number])}))
    assert await numbers(yard) == [3, 2, 1]


async def test_a_rule_is_taken_away_by_an_empty_one(yard, tree):
    assert (await retain(yard, keep_last=1)).keep_last == 1
    assert (await yard.user().GetRetention(pb.GetRetentionRequest(name="m"))).keep_last == 1
    await retain(yard)
    for number in range(3):
        await store(yard, tree({"a": bytes([number])}))
    assert await numbers(yard) == [3, 2, 1]


@pytest.mark.parametrize(
    "rule",
    [
        {"name": "no/name"},
        {"keep_last": -1},
        {"keep_best": 1},
        {"best_metric": "loss"},
        {"keep_best": 1, "best_metric": "loss"},
        {"ttl_s": float("nan")},
    ],
)
async def test_rules_that_say_nothing_are_refused(yard, rule):
    assert reason_of(await refused(retain(yard, **rule))) in ("BadName", "BadRetention")


async def test_kinds_have_default_rules_in_the_settings(tmp_path, tree):
    yard = Yard(tmp_path / "home", retention='{"data": {"keep_last": 2}}')
    await yard.start()
    for number in range(4):
        await store(yard, tree({"a": bytes([number])}))
    assert await numbers(yard) == [4, 3]
    await yard.stop()


def test_default_rules_are_checked():
    with pytest.raises(ValueError, match="keep_lst"):
        Settings(retention='{"data": {"keep_lst": 2}}')
