"""Trees go into the store: once, whole, in bounded memory, and on from where they were interrupted."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servicekit.auth import bearer_token
from trainyard.artifacts import ArtifactError, FileChanged, Pace, UnsafePath, describe, download, send, upload
from trainyard_protos.v1 import artifacts_pb2 as pb
from trainyard_protos.v1.admin_pb2 import MaintainRequest

from libs.trainyard.tests.artifacts.stubs import Counting, away
from services.artifacts.tests.store_kit import contents, noise

MIB = 1024 * 1024
SMALL = Pace(page_bytes=2 * MIB, pages=2, streams=1, patience_s=0)
WIDE = Pace(page_bytes=2 * MIB, pages=4, streams=2, patience_s=0)
EVERYTHING = {"workspace": "default", "name": "x", "kind": "data"}


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fail_after=st.integers(0, 9 * MIB), pace=st.sampled_from([SMALL, WIDE]), seed=st.integers(0, 10**6))
async def test_an_upload_that_breaks_off_anywhere_resends_one_part_at_most(yard, root, fail_after, pace, seed):
    (root / "model.bin").write_bytes(noise(7 * MIB, seed))
    for number in range(50):
        (root / f"{number}").write_bytes(noise(20_000, seed + 1 + number))
    size = sum(path.stat().st_size for path in root.iterdir())
    stub = Counting(yard.user(), fail_after=fail_after)
    with suppress(grpc.RpcError):
        await send(stub, "default", root, pace=pace)
    again = Counting(yard.user())
    await upload(again, root, **EVERYTHING, pace=pace)
    assert again.sent <= size - stub.stored
    assert stub.sent + again.sent <= size + pace.part_bytes


async def test_a_killed_uploader_leaves_what_was_stored_to_the_next_one(yard, root, tmp_path):
    (root / "model.bin").write_bytes(noise(40 * MIB))
    child = f"""
import asyncio, os, signal
from pathlib import Path
from trainyard.artifacts import Pace, send
from trainyard.channel import connect
from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceStub
stored = 0
def progress(done):
    global stored
    stored += done
    if stored >= {20 * MIB}:
        print(stored, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
async def main():
    async with connect("127.0.0.1:{yard._port}", {bearer_token(yard.home)!r}) as channel:
        await send(ArtifactServiceStub(channel), "default", Path({str(root)!r}), pace=Pace(page_bytes={2 * MIB}),
            progress=progress)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", child, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == -signal.SIGKILL
    stub = Counting(yard.user())
    await upload(stub, root, **EVERYTHING)
    assert stub.sent <= 40 * MIB - int(output)
    await download(yard.user(), "x", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == contents(root)


async def test_a_store_that_is_away_for_a_moment_is_asked_again(yard, root):
    (root / "a").write_bytes(noise(MIB))

    class Shaky(Counting):
        failed: Counter[str] = Counter()

        def __getattr__(self, name):
            method = super().__getattr__(name)

            async def call(*arguments, **options):
                answer = await method(*arguments, **options)
                self.failed[name] += 1
                if self.failed[name] == 1:
                    raise away()  # it was done, but nobody heard
                return answer

            return call

    version = await upload(Shaky(yard.user()), root, **EVERYTHING)
    assert Shaky.failed == {"FindMissing": 2, "Commit": 2}
    assert version.number == 1


async def test_a_channel_that_is_closed_meanwhile_is_an_error(yard, root):
    (root / "a").write_bytes(noise(MIB))

    class Closing(Counting):
        async def FindMissing(self, request, timeout):
            raise asyncio.CancelledError  # what gRPC says, though nobody cancelled the task

    with pytest.raises(grpc.aio.AioRpcError, match="closed on this side"):
        await upload(Closing(yard.user()), root, **EVERYTHING)


async def test_what_has_to_be_waited_for_comes_between_sending_and_the_commit(yard, root):
    (root / "a").write_bytes(noise(MIB))
    stub, seen = Counting(yard.user()), []

    async def before_commit():
        seen.append(list(stub.calls))

    await upload(stub, root, **EVERYTHING, before_commit=before_commit)
    [calls] = seen
    assert "PutChunks" in calls and "Commit" not in calls
    assert stub.calls.count("Commit") == 1


async def test_a_definite_no_is_not_asked_again(yard, root):
    (root / "a").write_bytes(b"1")
    stub = Counting(yard.user())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await upload(stub, root, workspace="default", name="Not A Name", kind="data")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert stub.calls.count("Commit") == 1


async def test_chunks_swept_before_the_commit_are_sent_again(yard, root):
    (root / "a").write_bytes(noise(MIB))

    class Late(Counting):
        async def Commit(self, request, timeout):
            self.calls.append("Commit")
            if self.calls.count("Commit") == 1:
                await yard.age()
                await yard.admin().Maintain(MaintainRequest())
            return await self._stub.Commit(request, timeout=timeout)

    stub = Late(yard.user())
    version = await upload(stub, root, **EVERYTHING)
    assert version.number == 1
    assert stub.sent == 2 * MIB


async def test_equal_content_is_sent_once(yard, root):
    for name in "abc":
        (root / name).write_bytes(noise(100_000))
    assert (await send(yard.user(), "default", root)).bytes == 100_000


async def test_a_slow_store_slows_reading_and_memory_stays_bounded(yard, root):
    (root / "model.bin").write_bytes(noise(20 * MIB))
    asked, allowed = asyncio.Event(), asyncio.Event()

    class Slow(Counting):
        async def FindMissing(self, request, timeout):
            self.calls.append("FindMissing")
            if self.calls.count("FindMissing") == SMALL.pages - 1:
                asked.set()
            await allowed.wait()
            return await self._stub.FindMissing(request, timeout=timeout)

    stub = Slow(yard.user())
    sending = asyncio.create_task(send(stub, "default", root, pace=SMALL))
    await asked.wait()
    await asyncio.sleep(0)
    assert stub.calls.count("FindMissing") < SMALL.pages  # one page is being filled
    allowed.set()
    assert (await sending).bytes == 20 * MIB


async def test_progress_adds_up_to_the_size_of_the_tree(yard, root):
    (root / "model.bin").write_bytes(noise(9 * MIB))
    (root / "same.bin").write_bytes(noise(9 * MIB))
    (root / "small").write_bytes(b"1")
    for _ in range(2):  # also when everything is there already
        done = []
        await upload(yard.user(), root, **EVERYTHING, progress=done.append)
        assert sum(done) == 18 * MIB + 1


async def test_a_file_that_changes_while_it_is_read_is_refused(yard, root):
    path = root / "model.bin"
    path.write_bytes(noise(20 * MIB))

    class Meanwhile(Counting):
        async def FindMissing(self, request, timeout):
            with path.open("ab") as file:
                file.write(b"more")
            return await self._stub.FindMissing(request, timeout=timeout)

    with pytest.raises(FileChanged, match=r"model\.bin changed while it was read"):
        await upload(Meanwhile(yard.user()), root, **EVERYTHING, pace=SMALL)


async def test_a_file_that_shrinks_while_it_is_read_is_refused(yard, root):
    path = root / "model.bin"
    path.write_bytes(noise(20 * MIB))

    class Meanwhile(Counting):
        async def FindMissing(self, request, timeout):
            os.truncate(path, MIB)
            return await self._stub.FindMissing(request, timeout=timeout)

    with pytest.raises(FileChanged):
        await upload(Meanwhile(yard.user()), root, **EVERYTHING, pace=SMALL)


async def test_a_file_that_is_gone_is_named(yard, root):
    with pytest.raises(FileNotFoundError) as caught:
        await upload(yard.user(), root, [Path("gone")], **EVERYTHING)
    assert caught.value.filename == str(root / "gone")


async def test_what_is_no_file_is_refused(root):
    os.mkfifo(root / "pipe")
    with pytest.raises(UnsafePath, match="not a regular file"):
        await describe(root)


async def test_a_path_outside_of_the_tree_is_refused(root, tmp_path):
    (tmp_path / "secret").write_text("x")
    for path in (tmp_path / "secret", Path("../secret")):
        with pytest.raises(UnsafePath):
            await describe(root, [path])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (b"caf\xe9", r"'caf\\xe9' is not valid UTF-8"),
        (b"line\nend", "holds a line end"),
        (b"back\\slash", "holds a backslash"),
    ],
)
async def test_names_that_other_machines_could_not_hold_are_refused(root, name, what):
    (root / os.fsdecode(name)).write_text("x")
    with pytest.raises(UnsafePath, match=what):
        await describe(root)


async def test_a_link_to_a_name_that_is_no_text_is_refused(root):
    (root / "link").symlink_to(os.fsdecode(b"caf\xe9"))
    with pytest.raises(UnsafePath, match="not valid UTF-8"):
        await describe(root)


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "a/../../outside"])
async def test_a_link_out_of_the_tree_is_refused(root, target):
    (root / "link").symlink_to(target)
    with pytest.raises(UnsafePath, match="link 'link'"):
        await describe(root)


async def test_names_of_any_script_empty_files_and_modes_come_back(yard, root, tmp_path):
    for name, mode in (("größe.bin", 0o640), ("模型", 0o755), ("🚂 a b", 0o400), ("-rf", 0o444)):
        (root / name).write_bytes(name.encode())
        (root / name).chmod(mode)
    (root / "empty").touch()
    await upload(yard.user(), root, **EVERYTHING)
    await download(yard.user(), "x", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == contents(root)
    modes = [{path.name: path.stat().st_mode for path in folder.iterdir()} for folder in (root, tmp_path / "out")]
    assert modes[0] == modes[1]


async def test_an_empty_tree_is_a_version(yard, root, tmp_path):
    assert (await upload(yard.user(), root, **EVERYTHING)).files == 0
    await download(yard.user(), "x", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == {}


async def test_paths_may_be_as_long_as_the_system_allows(yard, root, tmp_path):
    parts = ["d" * 78] * 51 + ["f" * 60]
    make_deep(root, parts, b"deep")
    version = await upload(yard.user(), root, **EVERYTHING)
    await download(yard.user(), "x", tmp_path / "out", workspace="default")
    assert len("/".join(parts)) == 4089
    assert await describe(tmp_path / "out") == await describe(root)
    assert version.files == 1


def make_deep(root, parts, content):
    """A file whose whole path is longer than one call takes."""
    here = os.open(root, os.O_DIRECTORY)
    for part in parts[:-1]:
        os.mkdir(part, dir_fd=here)
        below = os.open(part, os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    file = os.open(parts[-1], os.O_CREAT | os.O_WRONLY, dir_fd=here)
    os.write(file, content)
    os.close(file)
    os.close(here)


async def test_a_sparse_file_comes_back_sparse(yard, root, tmp_path):
    with (root / "sparse").open("wb") as file:
        file.write(b"begin")
        file.seek(64 * MIB)
        file.write(b"end")
    assert (await send(yard.user(), "default", root)).bytes < 4 * MIB
    await upload(yard.user(), root, **EVERYTHING)
    await download(yard.user(), "x", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == contents(root)
    assert (tmp_path / "out" / "sparse").stat().st_blocks * 512 < 8 * MIB


async def test_more_files_than_a_version_may_have_are_refused_with_the_bound():
    from trainyard.artifacts import manifest

    with pytest.raises(ArtifactError, match="at most 100,000"):
        manifest.make(pb.File(path=f"{number}") for number in range(100_001))
