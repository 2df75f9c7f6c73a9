"""Versions come back whole or not at all, on from where they were interrupted, and without what is here already."""

import os
import subprocess

import grpc
import pytest
from trainyard.artifacts import NoRoom, Pace, TargetBusy, TargetExists, download, list_files, read_file, sync, upload
from trainyard.artifacts.draft import beside
from trainyard_protos.v1 import artifacts_pb2 as pb

from libs.trainyard.tests.artifacts.stubs import Counting
from services.artifacts.tests.store_kit import contents, noise

MIB = 1024 * 1024
NOW = Pace(patience_s=0)


@pytest.fixture
def put(yard, root):
    """Stores files as the next version of "x"."""

    async def put(files):
        for path in sorted(root.rglob("*"), reverse=True):
            path.unlink() if path.is_symlink() or path.is_file() else path.rmdir()
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        return await upload(yard.user(), root, workspace="default", name="x", kind="data")

    return put


def fetch(stub, target, how=download, **options):
    return how(stub, "x", target, workspace="default", pace=NOW, **options)


def draft_of(target):
    return target.parent / f".{target.name}.partial"


async def test_a_download_that_broke_off_fetches_only_the_rest(yard, put, tmp_path):
    files = {"model.bin": noise(24 * MIB), "a/small": b"1", "empty": b""}
    await put(files)
    with pytest.raises(grpc.aio.AioRpcError):
        await fetch(Counting(yard.user(), fail_after=16 * MIB), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    again = Counting(yard.user())
    await fetch(again, tmp_path / "out")
    assert again.received < 16 * MIB
    assert contents(tmp_path / "out") == files
    assert not draft_of(tmp_path / "out").exists()


async def test_what_was_damaged_in_a_draft_is_fetched_again(yard, put, tmp_path):
    files = {"model.bin": noise(24 * MIB)}
    await put(files)
    with pytest.raises(grpc.aio.AioRpcError):
        await fetch(Counting(yard.user(), fail_after=20 * MIB), tmp_path / "out")
    [partial] = draft_of(tmp_path / "out").rglob("model.bin")
    with partial.open("r+b") as file:
        file.write(b"damage")
    await fetch(yard.user(), tmp_path / "out")
    assert contents(tmp_path / "out") == files


async def test_a_draft_of_another_version_is_not_mixed_in(yard, put, tmp_path):
    await put({"model.bin": noise(24 * MIB), "old": b"1"})
    with pytest.raises(grpc.aio.AioRpcError):
        await fetch(Counting(yard.user(), fail_after=8 * MIB), tmp_path / "out")
    newer = {"model.bin": noise(MIB, seed=1)}
    await put(newer)
    await fetch(yard.user(), tmp_path / "out")
    assert contents(tmp_path / "out") == newer


async def test_progress_adds_up_also_when_a_download_goes_on(yard, put, tmp_path):
    version = await put({"model.bin": noise(24 * MIB), "same": noise(24 * MIB)})
    with pytest.raises(grpc.aio.AioRpcError):
        await fetch(Counting(yard.user(), fail_after=16 * MIB), tmp_path / "out")
    done = []
    await fetch(yard.user(), tmp_path / "out", progress=done.append)
    assert sum(done) == version.size
    assert done[0] >= 8 * MIB


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("how", [download, sync])
async def test_what_the_disk_has_no_room_for_is_refused_before_it_is_fetched(yard, put, small_disk, how):
    """Also when what has to be fetched is small: here one chunk in a thousand files."""
    await put({"a": noise(64 * 1024)})
    stub = yard.user()
    [file] = (await stub.GetVersion(pb.GetVersionRequest(workspace="default", reference="x"))).manifest.files
    files = [pb.File(path=f"{number:04d}", size=file.size, mode=0o644, chunks=file.chunks) for number in range(1000)]
    await stub.Commit(pb.CommitRequest(workspace="default", name="x", kind="data", manifest=pb.Manifest(files=files)))
    with pytest.raises(NoRoom, match=r"65,536,000 bytes are to be fetched, and the disk .* has 1\d,\d+,\d+ free"):
        await fetch(stub, small_disk / "out", how)
    assert not contents(small_disk / "out")


async def test_holes_of_a_sparse_file_need_no_room(yard, root, put, small_disk):
    with (root / "sparse").open("wb") as file:
        file.write(b"begin")
        file.truncate(64 * MIB)
    await upload(yard.user(), root, workspace="default", name="x", kind="data")
    await fetch(yard.user(), small_disk / "out")
    assert (small_disk / "out" / "sparse").stat().st_size == 64 * MIB


async def test_two_downloads_into_one_target_do_not_meet(yard, put, tmp_path):
    await put({"a": b"1"})
    with beside(tmp_path / "out"), pytest.raises(TargetBusy, match="another download"):
        await fetch(yard.user(), tmp_path / "out")
    await fetch(yard.user(), tmp_path / "out")
    assert contents(tmp_path / "out") == {"a": b"1"}


async def test_a_closed_channel_never_leaves_part_of_a_tree(yard, put, tmp_path):
    await put({"model.bin": noise(24 * MIB)})

    class Closing(Counting):
        async def GetChunks(self, request, timeout):
            import asyncio

            async for message in self._stub.GetChunks(request, timeout=timeout):
                yield message
                raise asyncio.CancelledError  # what gRPC says, though nobody cancelled the task

    with pytest.raises(grpc.aio.AioRpcError, match="closed on this side"):
        await fetch(Closing(yard.user()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_a_folder_is_brought_to_a_version_by_what_differs(yard, put, tmp_path):
    model = noise(16 * MIB)
    await put({"model.bin": model, "config": b"1", "gone/later": b"x"})
    target = tmp_path / "out"
    await fetch(yard.user(), target)
    (target / "mine").write_bytes(b"kept")
    newer = {"model.bin": noise(1000, seed=2) + model, "config": b"2", "new/file": b"3", "copy.bin": model}
    await put(newer)
    stub = Counting(yard.user())
    done = []
    version = await fetch(stub, target, sync, progress=done.append)
    assert stub.received < 2 * MIB
    assert contents(target) == {**newer, "mine": b"kept", "gone/later": b"x"}
    assert sum(done) == version.size
    assert not draft_of(target).exists()


async def test_a_folder_that_is_equal_costs_no_bytes(yard, put, tmp_path):
    await put({"model.bin": noise(4 * MIB)})
    await fetch(yard.user(), tmp_path / "out")
    before = (tmp_path / "out" / "model.bin").stat()
    (tmp_path / "out" / "model.bin").chmod(0o600)
    stub = Counting(yard.user())
    await fetch(stub, tmp_path / "out", sync)
    after = (tmp_path / "out" / "model.bin").stat()
    assert stub.received == 0
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)


async def test_a_folder_that_is_not_there_is_made(yard, put, tmp_path):
    await put({"a/b": b"1"})
    await fetch(yard.user(), tmp_path / "new" / "out", sync)
    assert contents(tmp_path / "new" / "out") == {"a/b": b"1"}


async def test_nothing_is_written_through_a_link_of_the_folder(yard, put, tmp_path):
    await put({"a/b": b"1"})
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").symlink_to(outside)
    with pytest.raises(TargetExists, match="is not a folder"):
        await fetch(yard.user(), tmp_path / "out", sync)
    assert list(outside.iterdir()) == []


async def test_a_folder_where_a_file_goes_is_left_alone(yard, put, tmp_path):
    await put({"a": b"1"})
    (tmp_path / "out" / "a").mkdir(parents=True)
    with pytest.raises(TargetExists, match="is a folder"):
        await fetch(yard.user(), tmp_path / "out", sync)


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 0), (5, 10), (0, 3 * MIB), (MIB - 1, 2), (3 * MIB, 0), (10, 8 * MIB)]
)
async def test_a_part_of_one_file_is_read_without_the_rest(yard, put, offset, length):
    content = noise(3 * MIB)
    await put({"a/model.bin": content, "other": noise(3 * MIB, seed=1)})
    pace = Pace(page_bytes=MIB)
    pieces = read_file(yard.user(), "x", "a/model.bin", workspace="default", offset=offset, length=length, pace=pace)
    found = b"".join([piece async for piece in pieces])
    assert found == content[offset : offset + length if length else None]


async def test_files_are_listed_without_fetching_them(yard, put):
    await put({f"a/{number:03}": b"x" for number in range(20)} | {"b": b"yy"})
    everything = [file async for file in list_files(yard.user(), "x", workspace="default")]
    below = [file.path async for file in list_files(yard.user(), "x", workspace="default", prefix="a/01")]
    assert [(file.path, file.size) for file in everything][-2:] == [("a/019", 1), ("b", 2)]
    assert below == [f"a/{number:03}" for number in range(10, 20)]
