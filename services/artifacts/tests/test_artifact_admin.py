"""What an operator asks: usage, verification, repair, maintenance, backup."""

import grpc
from servicekit.auth import bearer_token
from servicekit.errors import reason_of
from trainyard.artifacts import download, upload
from trainyard_protos.v1 import admin_pb2
from trainyard_protos.v1 import artifacts_pb2 as pb

from services.artifacts.tests.store_kit import Yard, contents, entries_of, flip, noise, put, refused


async def store(yard, root, name="m"):
    return await upload(yard.user(), root, workspace="default", name=name, kind="data")


async def findings(yard, repair=False):
    request = admin_pb2.VerifyRequest(repair=repair)
    return [m.finding async for m in yard.admin().Verify(request) if m.HasField("finding")]


async def test_attempts_are_refused(yard):
    token, _ = yard.tokens.mint("default", "job", "job-1", 1, 60)
    error = await refused(yard.admin(token).GetUsage(admin_pb2.GetUsageRequest()))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.PERMISSION_DENIED, "UserOnly")


async def test_usage_tells_what_is_stored_and_what_nothing_uses(yard, tree):
    shared = noise(10_000)
    await store(yard, tree({"a": shared, "b": shared}))
    await put(yard.user(), b"unused")
    response = await yard.admin().GetUsage(admin_pb2.GetUsageRequest())
    found = {usage.what: (usage.bytes, usage.count) for usage in response.usage if usage.workspace == "default"}
    assert found["versions"] == (20_000, 1)
    assert found["chunks"] == (10_006, 2)
    assert found["unused chunks"] == (6, 1)
    assert found["packs"][1] == 2
    assert response.free_bytes > 0


async def test_a_sound_store_has_no_findings(yard, tree):
    await store(yard, tree({"a": noise(5000), "b": noise(3_000_000, 1)}))
    await store(yard, tree({"a": noise(5000), "c": noise(100, 2)}))
    await put(yard.user(), b"unused")
    messages = [m async for m in yard.admin().Verify(admin_pb2.VerifyRequest())]
    assert not [m for m in messages if m.HasField("finding")]
    assert messages[-1].checked == messages[-1].total > 0


async def test_a_missing_database_is_found_and_costs_no_pack(tmp_path, tree):
    yard = Yard(tmp_path / "home")
    await yard.start()
    await store(yard, tree({"a": noise(5000)}))
    await yard.stop()
    (yard.home / "artifacts.db").unlink()
    yard.settings = yard.settings.model_copy(update={"orphan_grace_s": 1e-9})
    await yard.start()
    (finding,) = await findings(yard)
    assert "artifacts.db was missing at the start" in finding.what
    await yard.admin().Maintain(admin_pb2.MaintainRequest())
    assert len(yard.packs()) == 1
    assert (await findings(yard, repair=True))[0].lost
    assert await findings(yard) == []
    await yard.admin().Maintain(admin_pb2.MaintainRequest())
    assert yard.packs() == []
    await yard.stop()


async def test_a_flipped_bit_is_found_and_names_the_files(yard, tree):
    await store(yard, tree({"w/model.bin": noise(5000), "sound": noise(5000, 1)}))
    (pack,) = yard.packs()
    entry = next(entry for entry in entries_of(pack) if pack.read_bytes()[entry.offset :].startswith(noise(5000)))
    flip(pack, entry.offset + 17)
    (found,) = await findings(yard)
    assert (found.repaired, found.lost) == (False, "'w/model.bin' of version 1 of 'm' in workspace 'default'")


async def test_repair_finds_a_copy_in_another_pack(yard, tree, tmp_path):
    root = tree({"a": noise(5000)})
    await store(yard, root)
    (first,) = yard.packs()
    await yard.sql("UPDATE artifact_chunk SET damaged = :yes", yes=True)
    await store(yard, root, "again")  # now the chunk is in two packs, and the second one counts
    second = next(pack for pack in yard.packs() if pack != first)
    flip(second, 77)
    (found,) = await findings(yard, repair=True)
    assert (found.repaired, found.lost) == (True, "")
    await download(yard.user(), "m", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == contents(root)
    assert await findings(yard) == []


async def test_what_repair_cannot_mend_counts_as_missing_so_that_sending_it_again_heals(yard, tree, tmp_path):
    root = tree({"a": noise(5000)})
    await store(yard, root)
    flip(yard.packs()[0], 77)
    (found,) = await findings(yard, repair=True)
    assert not found.repaired
    await store(yard, root, "again")
    assert await findings(yard) == []
    await download(yard.user(), "m", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == contents(root)


async def test_a_lost_index_is_made_again_from_packs(yard, tree, tmp_path):
    root = tree({"a": noise(5000), "b/c": noise(3_000_000, 1)})
    await store(yard, root)
    for table in ("artifact_chunk", "artifact_pack"):
        await yard.sql(f"DELETE FROM {table}")
    assert all(found.repaired for found in await findings(yard, repair=True))
    assert await findings(yard) == []
    await yard.age()
    await yard.app.collector.collect()
    await download(yard.user(), "m", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == contents(root)


async def test_a_damaged_table_is_written_again(yard, tree, tmp_path):
    root = tree({"a": noise(5000)})
    await store(yard, root)
    (pack,) = yard.packs()
    flip(pack, pack.stat().st_size - 30)
    (found,) = await findings(yard)
    assert "table" in found.what
    (found,) = await findings(yard, repair=True)
    assert found.repaired
    await yard.app.collector.collect()
    assert await findings(yard) == []
    assert pack not in yard.packs()
    await download(yard.user(), "m", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == contents(root)


async def test_a_damaged_manifest_is_named(yard, tree):
    await store(yard, tree({"a": noise(5000)}))
    await yard.sql("UPDATE artifact_manifest SET content = :content", content=pb.Manifest().SerializeToString())
    found = await findings(yard)
    assert "every file of version 1 of 'm'" in found[0].lost
    assert "cannot be counted" in found[1].what


async def test_wrong_counts_are_counted_again(yard, tree):
    await store(yard, tree({"a": noise(5000), "b": noise(5000, 1)}))
    await yard.sql("UPDATE artifact_chunk SET refs = 0")
    assert [found.repaired for found in await findings(yard)] == [False]
    assert [found.repaired for found in await findings(yard, repair=True)] == [True]
    assert await findings(yard) == []


async def test_maintenance_says_what_it_did(yard, tree):
    await store(yard, tree({"a": noise(50_000)}))
    await yard.user().DeleteVersion(pb.DeleteVersionRequest(reference="m"))
    await yard.age()
    response = await yard.admin().Maintain(admin_pb2.MaintainRequest())
    assert list(response.done) == ["unused chunks removed: 1", "empty packs removed: 1"]
    assert response.freed_bytes > 50_000
    assert yard.packs() == []


async def test_a_backup_in_an_empty_home_is_the_store_again(tmp_path, tree):
    yard = Yard(tmp_path / "home")
    await yard.start()
    root = tree({"a": noise(5000), "b/c": noise(3_000_000, 1)})
    await store(yard, root)
    copy = tmp_path / "copy"
    async for piece in yard.admin().Backup(admin_pb2.BackupRequest()):
        path = copy / piece.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(piece.data)
    await yard.stop()
    restored = Yard(copy)
    await restored.start()
    assert bearer_token(copy) != bearer_token(tmp_path / "home")
    await download(restored.user(), "m", tmp_path / "out", workspace="default")
    assert contents(tmp_path / "out") == contents(root)
    assert await findings(restored) == []
    await restored.stop()


async def test_a_database_with_tools_of_its_own_is_not_copied_here(tmp_path, postgres_url):
    yard = Yard(tmp_path / "home", postgres_url)
    await yard.start()
    error = await refused(anext(aiter(yard.admin().Backup(admin_pb2.BackupRequest()))))
    assert reason_of(error) == "NotSqlite"
    await yard.stop()
