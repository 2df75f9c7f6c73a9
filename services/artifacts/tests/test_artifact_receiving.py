"""What comes in: batches, bounds, senders that stop, disks that are full."""

import asyncio

import grpc
import pytest
from blake3 import blake3
from servicekit.errors import reason_of
from trainyard.artifacts import download, upload
from trainyard_protos.v1 import artifacts_pb2 as pb

from services.artifacts.tests.store_kit import Yard, contents, noise, put, refused

MIB = 1024 * 1024


@pytest.fixture
def database_url(tmp_path):
    """Bytes take the same way whatever the database is."""
    return f"sqlite:///{tmp_path}/database.db"


def chunk(data, **fields):
    return pb.Chunk(hash=blake3(data).digest(), data=data, **fields)


@pytest.fixture
async def small(tmp_path):
    """A store with room for two batches of 1 MiB at once."""
    yard = Yard(tmp_path / "home", put_batch_bytes=MIB, receive_bytes=18 * MIB, receive_wait_s=0.2)
    await yard.start()
    yield yard
    await yard.stop()


async def test_chunks_that_travel_together_are_kept_each(yard):
    first = chunk(b"first", workspace="default", more=[chunk(b"second"), chunk(b"third")])

    async def messages():
        yield first

    assert (await yard.user().PutChunks(messages())).stored == 3
    assert yard.stored().keys() == {blake3(data).digest() for data in (b"first", b"second", b"third")}


async def test_a_batch_is_one_pack_and_what_follows_is_the_next(small):
    blocks = [noise(300_000, seed) for seed in range(10)]
    response = await put(small.user(), *blocks)
    assert (response.stored, response.bytes) == (10, 3_000_000)
    assert len(small.packs()) == 3


async def test_batches_before_a_bad_one_are_kept(small):
    blocks = [noise(600_000, seed) for seed in range(3)]

    async def messages():
        for data in blocks:
            yield chunk(data, workspace="default")
        yield pb.Chunk(hash=bytes(32), data=b"wrong")

    assert reason_of(await refused(small.user().PutChunks(messages()))) == "HashMismatch"
    hashes = [blake3(data).digest() for data in blocks]
    missing = await small.user().FindMissing(pb.FindMissingRequest(hashes=hashes))
    assert list(missing.hashes) == hashes[2:]


async def test_a_sender_that_stands_still_is_cut(tmp_path):
    yard = Yard(tmp_path / "home", receive_idle_s=0.05)
    await yard.start()
    over = asyncio.Event()

    async def messages():
        yield chunk(b"stuck", workspace="default")
        await over.wait()

    error = await refused(yard.user().PutChunks(messages()))
    over.set()
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.DEADLINE_EXCEEDED, "UploadIdle")
    await yard.stop()


async def test_uploads_beyond_the_bound_wait_for_their_turn_and_are_told_when_it_does_not_come(small):
    def receiving():
        return small.app.registry.get_sample_value("trainyard_artifact_receiving_bytes")

    go_on = asyncio.Event()

    async def slow(data):
        yield chunk(data, workspace="default")
        await go_on.wait()

    calls = [asyncio.create_task(_answer(small.user().PutChunks(slow(data)))) for data in (b"one", b"two")]
    while receiving() < 6:
        await asyncio.sleep(0.01)
    assert reason_of(await refused(put(small.user(), b"waits"))) == "Busy"
    go_on.set()
    assert [response.stored for response in await asyncio.gather(*calls)] == [1, 1]
    assert (await put(small.user(), b"goes on")).stored == 1
    assert receiving() == 0


async def _answer(call):
    return await call


async def test_a_batch_with_one_wrong_hash_is_not_kept(yard):
    async def messages():
        yield chunk(b"right", workspace="default", more=[pb.Chunk(hash=bytes(32), data=b"wrong")])

    assert reason_of(await refused(yard.user().PutChunks(messages()))) == "HashMismatch"
    assert yard.packs() == []


@pytest.mark.parametrize(
    "message",
    [
        pb.Chunk(hash=b"short", data=b"1"),
        pb.Chunk(hash=bytes(32), data=b""),
        pb.Chunk(hash=bytes(32), data=b"1", more=[pb.Chunk(hash=bytes(32), data=bytes(4 * MIB + 1))]),
        pb.Chunk(hash=bytes(32), data=b"1", more=[pb.Chunk(hash=bytes(32), data=b"2", more=[pb.Chunk()])]),
        pb.Chunk(hash=bytes(32), data=bytes(4 * MIB), more=[pb.Chunk(hash=bytes(32), data=bytes(3 * MIB))] * 2),
    ],
)
async def test_messages_out_of_bounds_are_refused(yard, message):
    async def messages():
        yield message

    assert reason_of(await refused(yard.user().PutChunks(messages()))) == "BadChunk"


async def test_a_full_disk_is_told_what_was_stored_stays_and_it_goes_on_when_there_is_space(tmp_path, tree, full_disk):
    yard = Yard(tmp_path / "home")
    (yard.home / "packs").symlink_to(full_disk)
    await yard.start()
    await upload(yard.user(), tree({"a": b"1"}), workspace="default", name="m", kind="data")
    filler = full_disk / "filler"
    filler.write_bytes(bytes(1_900_000))
    error = await refused(put(yard.user(), noise(500_000)))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "DiskFull")
    await download(yard.user(), "m", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == {"a": b"1"}
    filler.unlink()
    assert (await put(yard.user(), noise(500_000))).stored == 1
    await yard.stop()
