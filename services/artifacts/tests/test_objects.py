"""What every place for packs has to do: the same laws for a folder and for a bucket."""

import pytest
from servicekit.errors import ResourceExhausted, Unavailable
from trainyard_artifacts.folder import UNFINISHED, FolderObjects
from trainyard_artifacts.objects import ObjectMissing
from trainyard_artifacts.s3 import S3Objects
from trainyard_artifacts.settings import Settings

from services.artifacts.tests.store_kit import noise, s3_settings

MIB = 1024 * 1024


@pytest.fixture(params=["folder", "bucket", "bucket/with/prefix"])
async def objects(request, tmp_path):
    if request.param == "folder":
        store = FolderObjects(tmp_path / "root")
    else:
        bucket = request.getfixturevalue("s3")
        prefix = request.param.removeprefix("bucket")
        store = S3Objects(Settings(**s3_settings(bucket) | {"s3_bucket": bucket.name + prefix}))
    yield store
    await store.close()


async def test_an_object_is_its_parts_one_after_the_other(objects):
    parts = [b"head", *(noise(1000, seed) for seed in range(2000)), b"tail"]
    whole = b"".join(parts)
    await objects.put("packs/w/a", parts)
    assert await objects.size("packs/w/a") == len(whole)
    assert await objects.get("packs/w/a", 0, len(whole)) == whole


async def test_a_range_is_read_alone(objects):
    await objects.put("packs/w/a", [b"0123456789"])
    assert await objects.get("packs/w/a", 3, 4) == b"3456"


async def test_large_objects_come_back(objects):
    data = noise(20 * MIB)
    await objects.put("packs/w/a", [data])
    assert await objects.get("packs/w/a", 0, len(data)) == data


async def test_what_is_not_there_or_too_short_is_missing(objects):
    await objects.put("packs/w/a", [b"0123456789"])
    for read in (objects.get("packs/w/b", 0, 1), objects.size("packs/w/b"), objects.get("packs/w/a", 8, 4)):
        with pytest.raises(ObjectMissing):
            await read


async def test_objects_are_listed_by_prefix(objects):
    assert await objects.list("packs/") == []
    for key in ("packs/v/a", "packs/w/a", "packs/w/b", "other/c"):
        await objects.put(key, [key.encode()])
    assert await objects.list("packs/") == [(key, 9) for key in ("packs/v/a", "packs/w/a", "packs/w/b")]
    assert await objects.list("packs/w/") == [("packs/w/a", 9), ("packs/w/b", 9)]


async def test_deleting_twice_is_harmless(objects):
    await objects.put("packs/w/a", [b"1"])
    for _ in range(2):
        await objects.delete("packs/w/a")
        assert await objects.list("packs/") == []


async def test_a_write_that_failed_leaves_nothing(tmp_path, monkeypatch):
    objects = FolderObjects(tmp_path / "root")

    def broken(descriptor):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("trainyard_artifacts.direct.os.fsync", broken)
        with pytest.raises(Unavailable, match="Input/output error"):
            await objects.put("packs/w/a", [b"1"])
    assert await objects.list("packs/") == []
    await objects.close()


async def test_an_unfinished_write_is_listed_under_a_name_of_its_own(tmp_path):
    objects = FolderObjects(tmp_path / "root")
    await objects.put("packs/w/a", [b"1"])
    (tmp_path / "root/packs/w/a").rename(tmp_path / "root/packs/w" / f"a{UNFINISHED}")
    assert await objects.list("packs/") == [(f"packs/w/a{UNFINISHED}", 1)]
    await objects.close()


async def test_a_full_disk_is_named(full_disk):
    objects = FolderObjects(full_disk)
    with pytest.raises(ResourceExhausted) as caught:
        await objects.put("packs/w/a", [noise(4 * MIB)])
    assert caught.value.reason == "DiskFull"
    await objects.put("packs/w/b", [b"fits"])
    assert await objects.list("packs/") == [("packs/w/b", 4)]
    await objects.close()


async def test_a_bucket_that_is_away_is_told_and_comes_back(s3_server, s3):
    objects = S3Objects(Settings(**s3_settings(s3), s3_timeout_s=5.0))
    await objects.put("packs/w/a", [b"1"])
    s3_server.kill()
    with pytest.raises(Unavailable) as caught:
        await objects.put("packs/w/b", [b"2"])
    assert caught.value.reason == "StorageFailed"
    assert s3.secret_key not in str(caught.value)
    s3_server.start()
    assert await objects.get("packs/w/a", 0, 1) == b"1"


def test_half_of_a_credential_is_refused():
    with pytest.raises(ValueError, match="belong together"):
        S3Objects(Settings(s3_bucket="b", s3_access_key_id="only"))


def test_secrets_do_not_show(s3):
    assert s3.secret_key not in repr(Settings(**s3_settings(s3)))
