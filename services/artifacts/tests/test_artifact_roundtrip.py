"""What goes in comes back, verified, and only what is missing is sent."""

import stat

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servicekit.errors import reason_of
from trainyard.artifacts import Damaged, TargetExists, download, send, upload
from trainyard_protos.v1 import artifacts_pb2 as pb

from services.artifacts.tests.store_kit import contents, flip, noise, refused

MIB = 1024 * 1024


@pytest.fixture
def database_url(tmp_path):
    """Bytes take the same way whatever the database is."""
    return f"sqlite:///{tmp_path}/database.db"


async def test_a_tree_comes_back_with_bytes_modes_and_links(yard, tree, tmp_path):
    root = tree({"train.py": b"print()", "big.bin": noise(9 * MIB), "a/b/empty": b""})
    (root / "train.py").chmod(0o755)
    (root / "a" / "link").symlink_to("../train.py")
    version = await upload(yard.user(), root, workspace="default", name="code", kind="code", labels={"by": "me"})
    fetched = await download(yard.user(), "code", tmp_path / "out", workspace="default")
    assert fetched == version
    assert (version.number, version.files, version.aliases, version.labels["by"]) == (1, 4, ["latest"], "me")
    assert contents(tmp_path / "out") == contents(root)
    assert stat.S_IMODE((tmp_path / "out" / "train.py").stat().st_mode) == 0o755
    assert str((tmp_path / "out" / "a" / "link").readlink()) == "../train.py"


async def test_only_chosen_files_are_stored(yard, tree, tmp_path):
    root = tree({"a.py": b"a", "b.py": b"b", "c/d.py": b"d"})
    paths = [root / "a.py", root / "c" / "d.py"]
    await upload(yard.user(), root, paths, workspace="default", name="code", kind="code")
    await download(yard.user(), "code", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == {"a.py": b"a", "c/d.py": b"d"}


async def test_a_second_version_sends_only_what_changed(yard, tree):
    data = bytearray(noise(32 * MIB))
    root = tree({"model.bin": bytes(data)})
    await upload(yard.user(), root, workspace="default", name="m", kind="data")
    (root / "model.bin").write_bytes(noise(1000, seed=1) + data)
    assert (await send(yard.user(), "default", root)).bytes <= 4 * MIB + 1000
    assert (await send(yard.user(), "default", root)).bytes == 0


async def test_equal_files_are_stored_once(yard, tree):
    data = noise(100_000)
    await upload(yard.user(), tree({"a": data, "b/c": data}), workspace="default", name="m", kind="data")
    assert sum(yard.stored().values()) == 1


async def test_an_upload_that_was_cut_goes_on_where_it_stopped(yard, tree):
    root = tree({f"{index}": noise(50_000, seed=index) for index in range(10)})
    await send(yard.user(), "default", root, [root / f"{index}" for index in range(6)])
    assert (await send(yard.user(), "default", root)).bytes == 4 * 50_000


async def test_versions_survive_a_restart_of_the_store(yard, tree, tmp_path):
    version = await upload(yard.user(), tree({"a": b"1"}), workspace="default", name="m", kind="data")
    await yard.stop()
    await yard.start()
    assert await download(yard.user(), version.id, tmp_path / "out", workspace="default") == version


async def test_a_flipped_bit_fails_the_read_and_names_the_file(yard, tree, tmp_path):
    version = await upload(yard.user(), tree({"w/model.bin": noise(5000)}), workspace="default", name="m", kind="data")
    flip(yard.packs()[0], 77)
    error = await refused(download(yard.user(), "m", tmp_path / "out", workspace="default"))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.DATA_LOSS, "ChunkDamaged")
    assert "'w/model.bin' of version 1 of 'm'" in error.details()
    assert not (tmp_path / "out").exists()
    assert version.id


async def test_storing_the_file_again_heals_a_damaged_chunk(yard, tree, tmp_path):
    root = tree({"model.bin": noise(5000)})
    await upload(yard.user(), root, workspace="default", name="m", kind="data")
    flip(yard.packs()[0], 77)
    await refused(download(yard.user(), "m", tmp_path / "out", workspace="default"))
    await upload(yard.user(), root, workspace="default", name="m2", kind="data")
    await download(yard.user(), "m", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == contents(root)


async def test_a_lost_chunk_fails_the_read_loudly(yard, tree, tmp_path):
    await upload(yard.user(), tree({"a": b"1"}), workspace="default", name="m", kind="data")
    yard.packs()[0].unlink()
    error = await refused(download(yard.user(), "m", tmp_path / "out", workspace="default"))
    assert error.code() == grpc.StatusCode.DATA_LOSS
    assert "gone" in error.details()


async def test_bytes_that_do_not_match_their_hash_are_refused(yard):
    async def chunks():
        yield pb.Chunk(workspace="default", hash=b"h" * 32, data=b"other bytes")

    error = await refused(yard.user().PutChunks(chunks()))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "HashMismatch")
    assert yard.packs() == []


async def test_a_target_that_holds_something_is_left_alone(yard, tree, tmp_path):
    await upload(yard.user(), tree({"a": b"1"}), workspace="default", name="m", kind="data")
    target = tree({"a": b"mine"})
    for merge in (False, True):
        with pytest.raises(TargetExists, match="already holds 'a'"):
            await download(yard.user(), "m", target, workspace="default", merge=merge)
    assert contents(target) == {"a": b"mine"}


async def test_merging_adds_to_a_folder_what_it_does_not_hold(yard, tree):
    await upload(yard.user(), tree({"a/x": b"1"}), workspace="default", name="m", kind="data")
    target = tree({"b": b"mine"})
    await download(yard.user(), "m", target, workspace="default", merge=True)
    assert contents(target) == {"a/x": b"1", "b": b"mine"}


async def test_a_download_that_fails_leaves_nothing_behind(yard, tree, tmp_path):
    await upload(yard.user(), tree({"a": noise(9 * MIB)}), workspace="default", name="m", kind="data")
    flip(yard.packs()[0], 77)
    (tmp_path / "place").mkdir()
    await refused(download(yard.user(), "m", tmp_path / "place" / "out", workspace="default"))
    assert list((tmp_path / "place").iterdir()) == []


class Tampering:
    """A store that lies: passes calls on, but changes what comes back."""

    def __init__(self, stub, *, detail=lambda detail: None, chunk=lambda chunk: None):
        self._stub, self._detail, self._chunk = stub, detail, chunk

    async def GetVersion(self, request, timeout):
        answer = await self._stub.GetVersion(request, timeout=timeout)
        self._detail(answer)
        return answer

    async def GetChunks(self, request, timeout):
        async for chunk in self._stub.GetChunks(request, timeout=timeout):
            self._chunk(chunk)
            yield chunk


async def test_a_client_does_not_trust_the_store(yard, tree, tmp_path):
    await upload(yard.user(), tree({"a": b"1"}), workspace="default", name="m", kind="data")

    def rename(detail):
        detail.manifest.files[0].path = "b"

    def change(chunk):
        chunk.data = b"2"

    for lie in (Tampering(yard.user(), detail=rename), Tampering(yard.user(), chunk=change)):
        with pytest.raises(Damaged):
            await download(lie, "m", tmp_path / "out", workspace="default")
    assert not (tmp_path / "out").exists()


names = st.text("abcdef.", min_size=1, max_size=8).filter(lambda name: name not in (".", ".."))
trees = st.dictionaries(st.lists(names, min_size=1, max_size=3).map("/".join), st.binary(max_size=2000), max_size=8)


def has_no_file_as_folder(files):
    return not any(other.startswith(f"{path}/") for path in files for other in files)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=trees.filter(has_no_file_as_folder))
async def test_any_tree_comes_back_as_it_was(yard, tree, tmp_path_factory, files):
    version = await upload(yard.user(), tree(files), workspace="default", name="any", kind="data")
    out = tmp_path_factory.mktemp("any") / "out"
    await download(yard.user(), version.id, out, workspace="default")
    assert contents(out) == files
