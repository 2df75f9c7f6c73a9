"""Whatever a user changes in the artifact store is an event, in the transaction that changes it."""

import grpc
import pytest
from servicekit.errors import reason_of
from trainyard.artifacts import upload
from trainyard_protos.v1 import admin_pb2
from trainyard_protos.v1 import artifacts_pb2 as pb

from services.artifacts.tests.store_kit import Yard, entries_of, flip, noise, refused


async def store(yard, root, name="m", **fields):
    return await upload(yard.user(), root, workspace="default", name=name, kind="data", **fields)


async def events(yard, **fields):
    return list((await yard.admin().ListAdminEvents(admin_pb2.ListAdminEventsRequest(**fields))).events)


async def told(yard, **fields):
    return [(event.type, event.object_name, event.message) for event in await events(yard, **fields)]


async def verify(yard):
    request = admin_pb2.VerifyRequest(repair=True)
    return [m.finding async for m in yard.admin().Verify(request) if m.HasField("finding")]


async def test_a_moved_alias_tells_where_it_pointed_and_where_it_points(yard, tree):
    user = yard.user()
    versions = [await store(yard, tree({"a": content})) for content in (b"1", b"2")]
    for version in (1, 1, 2):  # the second one changes nothing
        await user.SetAlias(pb.SetAliasRequest(reference=f"m@{version}", alias="best"))
    found = await events(yard)
    assert [event.message for event in found] == ["best: none -> version 1", "best: version 1 -> version 2"]
    assert {(event.type, event.kind, event.actor) for event in found} == {("AliasSet", "Artifact", "user/127.0.0.1")}
    assert [event.object_id for event in found] == [version.id for version in versions]
    # A commit moves aliases as well; "latest", which moves by itself, is in no event.
    await store(yard, tree({"a": b"3"}), aliases=["best", "latest", "new"])
    assert await told(yard, after_seq=found[-1].seq) == [
        ("AliasSet", "m", "best: version 2 -> version 3"),
        ("AliasSet", "m", "new: none -> version 3"),
    ]
    usage = (await yard.admin().GetUsage(admin_pb2.GetUsageRequest())).usage
    assert {each.what: each.count for each in usage}["events"] == 4


async def test_a_deleted_version_tells_what_became_of_its_aliases(yard, tree):
    await store(yard, tree({"a": b"1"}))
    await store(yard, tree({"a": b"22", "b": b"3"}), aliases=["best"])
    (made,) = await events(yard)
    await yard.user().DeleteVersion(pb.DeleteVersionRequest(reference="m@2"))
    assert (await refused(yard.user().DeleteVersion(pb.DeleteVersionRequest(reference="m@2")))).code() == (
        grpc.StatusCode.NOT_FOUND
    )
    message = "version 2: 2 files, 3 bytes -> deleted; best: version 2 -> none; latest: version 2 -> version 1"
    assert await told(yard, after_seq=made.seq) == [("VersionDeleted", "m", message)]


async def test_a_rule_tells_what_it_was_and_what_it_is(yard):
    async def rule(**fields):
        await yard.user().SetRetention(pb.SetRetentionRequest(retention=pb.Retention(name="m", **fields)))

    await rule()  # there is none to be taken away
    await rule(keep_last=3)
    await rule(keep_last=3)
    await rule(keep_last=5, ttl_s=86_400)
    await rule()
    assert [message for _, _, message in await told(yard)] == [
        "no rule of its own -> keep_last=3",
        "keep_last=3 -> keep_last=5, ttl_s=86400",
        "keep_last=5, ttl_s=86400 -> no rule of its own",
    ]


async def test_maintenance_by_a_user_tells_what_it_removed_and_the_hourly_one_nothing(yard, tree):
    await yard.user().SetRetention(pb.SetRetentionRequest(retention=pb.Retention(name="m", ttl_s=3600)))
    (rule,) = await events(yard)
    for content in (b"1", b"2"):
        await store(yard, tree({"a": content}))
    assert not (await yard.admin().Maintain(admin_pb2.MaintainRequest())).done
    assert await events(yard, after_seq=rule.seq) == []
    await yard.sql("UPDATE artifact_version SET created_ns = created_ns - :ns", ns=int(2 * 3600e9))
    await yard.admin().Maintain(admin_pb2.MaintainRequest())
    assert await told(yard, after_seq=rule.seq) == [
        ("VersionsExpired", "m", "2 of 2 versions deleted by ttl_s=3600: 1, 2"),
        ("Maintained", "artifacts", "0 bytes freed; versions expired: 2"),
    ]
    await yard.age()
    newest = (await events(yard))[-1].seq
    assert (await yard.app.collector.collect()).chunks == 2
    assert await events(yard, after_seq=newest) == []


@pytest.mark.parametrize("table", ["artifact_event", "artifact_alias", "artifact_retention"])
async def test_neither_a_change_nor_its_event_is_stored_without_the_other(yard, tree, table):
    await store(yard, tree({"a": b"1"}), aliases=["old"])
    await store(yard, tree({"a": b"2"}))
    before = await events(yard)
    user, away = yard.user(), f"{table}_away"
    changes = {
        "artifact_alias": [lambda: user.SetAlias(pb.SetAliasRequest(reference="m@2", alias="old"))],
        "artifact_retention": [
            lambda: user.SetRetention(pb.SetRetentionRequest(retention=pb.Retention(name="m", keep_last=1)))
        ],
    }
    changes["artifact_event"] = [
        *changes["artifact_alias"],
        *changes["artifact_retention"],
        lambda: user.DeleteVersion(pb.DeleteVersionRequest(reference="m@2")),
    ]
    await yard.sql(f"ALTER TABLE {table} RENAME TO {away}")
    for change in changes[table]:
        await refused(change())
    await yard.sql(f"ALTER TABLE {away} RENAME TO {table}")
    assert await events(yard) == before
    versions = (await user.ListVersions(pb.ListVersionsRequest(name="m"))).versions
    assert {version.number: list(version.aliases) for version in versions} == {2: ["latest"], 1: ["old"]}
    assert (await user.GetRetention(pb.GetRetentionRequest(name="m"))).keep_last == 0


async def test_a_repair_tells_what_was_mended_and_what_is_lost(yard, tree):
    root = tree({"a": noise(5000)})
    await store(yard, root)
    await yard.sql("UPDATE artifact_chunk SET damaged = :yes", yes=True)
    await store(yard, root, "again")  # now the chunk is in two packs, and the second one counts
    first, second = yard.packs()
    flip(second, 77)
    await verify(yard)
    ((kind, service, message),) = await told(yard)
    assert (kind, service) == ("Repaired", "artifacts")
    assert message.endswith("1 of its chunks cannot be read -> 1 found in other packs, 0 lost")
    flip(first, entries_of(first)[0].offset)
    await verify(yard)
    assert (await told(yard))[-1][2].endswith("-> 0 found in other packs, 1 lost")
    count = len(await events(yard))
    await verify(yard)  # the chunk is lost already: nothing changes
    await yard.sql("UPDATE artifact_chunk SET refs = 7")
    await verify(yard)
    assert [message for _, _, message in (await told(yard))[count:]] == [
        "1 of the chunks of workspace 'default' count wrong how many versions hold them"
    ]


async def test_a_backup_is_told_before_its_first_byte_and_after_its_last(tmp_path, tree):
    yard = Yard(tmp_path / "home")
    await yard.start()
    await store(yard, tree({"a": noise(5000)}))
    pieces = aiter(yard.admin().Backup(admin_pb2.BackupRequest()))
    size = len((await anext(pieces)).data)
    assert (await told(yard))[0] == ("BackupStarted", "artifacts", "")
    size += sum([len(piece.data) async for piece in pieces])
    assert await told(yard) == [
        ("BackupStarted", "artifacts", ""),
        ("BackupTaken", "artifacts", f"{size:,} bytes in 2 files"),
    ]
    await yard.stop()


async def test_attempts_may_not_read_events(yard):
    token, _ = yard.tokens.mint("default", "job", "job-1", 1, 60)
    error = await refused(yard.admin(token).ListAdminEvents(admin_pb2.ListAdminEventsRequest()))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.PERMISSION_DENIED, "UserOnly")
