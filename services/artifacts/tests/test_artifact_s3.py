"""The store over a real S3 server: what holds in a folder holds in a bucket."""

import grpc
import pytest
from servicekit.errors import reason_of
from trainyard.artifacts import download, upload
from trainyard_protos.v1 import artifacts_pb2 as pb

from services.artifacts.tests.store_kit import Yard, contents, noise, put, refused, s3_settings


@pytest.fixture
def s3_timeout_s():
    """How long the store tries; a test that waits for its refusal has another one."""
    return 30.0


@pytest.fixture
async def yard(tmp_path, s3, s3_timeout_s):
    yard = Yard(tmp_path / "home", **s3_settings(s3), s3_timeout_s=s3_timeout_s)
    await yard.start()
    yield yard
    await yard.stop()


async def test_a_tree_comes_back_from_a_bucket(yard, tree, tmp_path, s3_server, s3):
    root = tree({"big.bin": noise(20_000_000), **{f"small/{index}": noise(5000, index) for index in range(50)}})
    await upload(yard.user(), root, workspace="default", name="m", kind="data")
    await download(yard.user(), "m", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == contents(root)
    assert not (yard.home / "packs").exists()
    assert list((s3_server.objects / s3.name / "packs" / "default").iterdir())


async def test_what_nothing_uses_leaves_the_bucket(yard, tree, s3_server, s3):
    await upload(yard.user(), tree({"a": noise(5000)}), workspace="default", name="m", kind="data")
    await yard.user().DeleteVersion(pb.DeleteVersionRequest(reference="m"))
    await yard.age()
    done = await yard.app.collector.collect()
    assert (done.chunks, done.packs) == (1, 1)
    folder = s3_server.objects / s3.name / "packs" / "default"
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.parametrize("s3_timeout_s", [5.0])
async def test_uploads_are_refused_while_the_bucket_is_away_and_go_on_when_it_is_back(yard, tree, tmp_path, s3_server):
    await upload(yard.user(), tree({"a": b"1"}), workspace="default", name="m", kind="data")
    s3_server.kill()
    error = await refused(put(yard.user(), b"2"))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "StorageFailed")
    s3_server.start()
    assert (await put(yard.user(), b"2")).stored == 1
    await download(yard.user(), "m", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == {"a": b"1"}


async def test_a_lost_object_fails_the_read_loudly_and_names_the_file(yard, tree, tmp_path, s3_server, s3):
    await upload(yard.user(), tree({"w/model.bin": noise(5000)}), workspace="default", name="m", kind="data")
    (pack,) = (s3_server.objects / s3.name / "packs" / "default").iterdir()
    pack.unlink()
    error = await refused(download(yard.user(), "m", tmp_path / "out", workspace="default"))
    assert error.code() == grpc.StatusCode.DATA_LOSS
    assert "'w/model.bin' of version 1 of 'm'" in error.details()
