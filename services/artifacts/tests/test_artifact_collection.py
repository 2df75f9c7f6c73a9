"""What is removed, and what never is."""

import asyncio
import time

import pytest
from blake3 import blake3
from servicekit.errors import reason_of
from trainyard.artifacts import describe, download, send, upload, upload_part
from trainyard_artifacts import chunks
from trainyard_artifacts.chunks import runs
from trainyard_artifacts.folder import UNFINISHED
from trainyard_protos.v1 import artifacts_pb2 as pb

from services.artifacts.tests.store_kit import contents, noise, put, refused

OLD_ID = "01890000-0000-7000-8000-000000000000"


async def store(yard, root, name="m"):
    return await upload(yard.user(), root, workspace="default", name=name, kind="data")


async def delete(yard, reference):
    await yard.user().DeleteVersion(pb.DeleteVersionRequest(reference=reference))


async def test_chunks_that_nothing_uses_are_collected_and_others_stay(yard, tree, tmp_path):
    await store(yard, tree({"a": b"kept"}), "kept")
    await store(yard, tree({"a": b"gone"}), "gone")
    part = tree({"a": b"part"})
    fields = {"workspace": "default", "name": "parts", "kind": "output", "idempotency_key": "k"}
    assert await upload_part(yard.attempt(outputs=["parts"]), part, part=0, parts=2, **fields) is None
    await delete(yard, "gone")
    assert (await yard.app.collector.collect()).chunks == 0  # too young
    await yard.age()
    assert (await yard.app.collector.collect()).chunks == 1
    assert set(yard.stored()) == {blake3(b"kept").digest(), blake3(b"part").digest()}
    await download(yard.user(), "kept", tmp_path / "out", workspace="default")


async def test_parts_that_wait_too_long_give_their_chunks_up(yard, tree):
    fields = {"workspace": "default", "name": "parts", "kind": "output", "idempotency_key": "k"}
    await upload_part(yard.attempt(outputs=["parts"]), tree({"a": b"part"}), part=0, parts=2, **fields)
    await yard.sql("UPDATE artifact_part SET created_ns = 0")
    assert (await yard.app.collector.collect()).parts == 1
    await yard.age()
    assert (await yard.app.collector.collect()).chunks == 1


async def test_a_chunk_that_an_upload_was_told_is_there_is_not_collected(yard, tree):
    root = tree({"a": b"shared"})
    manifest = (await send(yard.user(), "default", root)).manifest
    await yard.age()
    assert (await send(yard.user(), "default", root)).bytes == 0
    assert (await yard.app.collector.collect()).chunks == 0
    await yard.user().Commit(pb.CommitRequest(name="m", kind="data", manifest=manifest))


async def test_deletion_begins_the_grace_time_of_what_it_gives_up(yard, tree):
    root = tree({"a": b"shared"})
    await store(yard, root)
    await yard.age()
    assert (await send(yard.user(), "default", root)).bytes == 0
    await delete(yard, "m")
    assert (await yard.app.collector.collect()).chunks == 0
    assert (await store(yard, root)).number == 2


async def test_a_commit_after_the_grace_time_is_told_what_is_missing(yard, tree):
    manifest = (await send(yard.user(), "default", tree({"a": b"late"}))).manifest
    await yard.age()
    await yard.app.collector.collect()
    request = pb.CommitRequest(name="m", kind="data", manifest=manifest)
    assert reason_of(await refused(yard.user().Commit(request))) == "ChunkMissing"


async def test_a_pack_with_little_left_is_rewritten(yard, tree, tmp_path):
    kept = tree({"small": noise(1000)})
    await put(yard.user(), noise(1000), noise(100_000, 1))
    await store(yard, kept)
    (before,) = yard.packs()
    await yard.age()
    done = await yard.app.collector.collect()
    assert (done.rewritten, done.packs) == (1, 1)
    (after,) = yard.packs()
    assert after != before
    assert after.stat().st_size < 2000
    await download(yard.user(), "m", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == contents(kept)
    assert (await yard.app.collector.collect()).rewritten == 0


async def test_many_small_packs_become_one(yard, tree, tmp_path):
    roots = [tree({"a": noise(2000, seed)}) for seed in range(20)]
    for root in roots:
        await store(yard, root)
    assert len(yard.packs()) == 20
    assert (await yard.app.collector.collect()).rewritten == 20
    assert len(yard.packs()) == 1
    for number, root in enumerate(roots, start=1):
        await download(yard.user(), f"m@{number}", tmp_path / f"{number}", workspace="default")
        assert contents(tmp_path / f"{number}") == contents(root)


async def test_a_reader_whose_pack_was_rewritten_finds_the_new_one(yard, tree):
    data = noise(1000)
    hash = blake3(data).digest()
    await put(yard.user(), data, noise(100_000, 1))
    await store(yard, tree({"a": data}))
    (old,) = runs([hash], await yard.app.chunks.places("default", [hash]))
    await yard.age()
    await yard.app.collector.collect()
    assert not (yard.home / "packs" / "default" / old.pack).exists()
    assert await yard.app.chunks.read("default", old) == [(hash, data)]


async def test_a_pack_with_a_damaged_chunk_is_left_alone(yard, tree):
    data = noise(1000)
    await put(yard.user(), data, noise(100_000, 1))
    await store(yard, tree({"a": data}))
    (pack,) = yard.packs()
    raw = pack.read_bytes()
    pack.write_bytes(raw.replace(data, noise(1000, 2)))
    await yard.age()
    assert (await yard.app.collector.collect()).rewritten == 0
    assert yard.packs() == [pack]


async def test_packs_that_nobody_finished_are_removed_once_they_are_old(yard, tree):
    await store(yard, tree({"a": b"1"}))
    (known,) = yard.packs()
    young = known.with_name(known.name[:-1] + ("0" if known.name[-1] != "0" else "1"))
    for name in (OLD_ID, OLD_ID + UNFINISHED, young.name, "what-somebody-put-here"):
        known.with_name(name).write_bytes(b"x")
    assert (await yard.app.collector.collect()).orphans == 2
    assert {path.name for path in yard.packs()} == {known.name, young.name, "what-somebody-put-here"}


async def test_a_manifest_that_lies_about_a_chunks_size_is_refused(yard, tree):
    root = tree({"a": b"12345"})
    await send(yard.user(), "default", root)
    manifest = await describe(root)
    manifest.files[0].size = manifest.files[0].chunks[0].size = 4
    request = pb.CommitRequest(name="m", kind="data", manifest=manifest)
    assert reason_of(await refused(yard.user().Commit(request))) == "BadManifest"


async def test_the_same_chunk_sent_many_times_at_once_is_stored_and_readable(yard, tree, tmp_path):
    data = noise(100_000)
    await asyncio.gather(*(put(yard.user(), data) for _ in range(8)))
    await store(yard, tree({"a": data}))
    await download(yard.user(), "m", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == {"a": data}


@pytest.mark.parametrize("order", ["delete first", "commit first"])
async def test_a_commit_and_a_deletion_of_the_same_chunks_meet(yard, tree, tmp_path, order):
    root = tree({"a": b"shared"})
    await store(yard, root, "old")
    new = store(yard, root, "new")
    await asyncio.gather(*((delete(yard, "old"), new) if order == "delete first" else (new, delete(yard, "old"))))
    await yard.age()
    await yard.app.collector.collect()
    await download(yard.user(), "new", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == {"a": b"shared"}


async def test_a_wall_clock_that_was_set_forward_makes_nothing_old(yard, tree, monkeypatch):
    await store(yard, tree({"a": b"gone"}), "gone")
    await delete(yard, "gone")
    (known,) = yard.packs()
    young = known.with_name(known.name[:-1] + ("0" if known.name[-1] != "0" else "1"))
    young.write_bytes(b"x")
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + 365 * 86_400 * 10**9)
    done = await yard.app.collector.collect()
    assert (done.chunks, done.orphans) == (0, 0)


async def test_a_pack_that_is_being_stored_is_no_leftover_however_old_its_name_looks(yard, tree, monkeypatch):
    await store(yard, tree({"a": b"1"}))
    (known,) = yard.packs()
    known.with_name(OLD_ID).write_bytes(b"x")
    monkeypatch.setattr(chunks, "new_id", lambda: OLD_ID)
    stored, put = [], yard.app.collector.objects.put

    async def put_while_collecting(key, parts):
        await put(key, parts)
        stored.append((await yard.app.collector.collect()).orphans)

    monkeypatch.setattr(yard.app.collector.objects, "put", put_while_collecting)
    await store(yard, tree({"a": b"2"}))
    assert stored == [0]
