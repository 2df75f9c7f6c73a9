"""Whatever a user changes in the metrics ingestor is an event, in the transaction that changes it."""

import pytest
from servicekit.ids import now_ns
from sqlalchemy import text
from trainyard_protos.v1 import admin_pb2
from trainyard_protos.v1 import metrics_pb2 as pb

from services.metrics.tests.metrics_kit import append, lines, open_run, points, refused, run_id

DAY_NS = 86_400 * 10**9


async def events(ingestor):
    return list((await ingestor.admin().ListAdminEvents(admin_pb2.ListAdminEventsRequest())).events)


async def told(ingestor):
    return [(event.type, event.object_name, event.message) for event in await events(ingestor)]


async def remove(ingestor, job="job", **fields):
    return (await ingestor.user().DeleteJobRuns(pb.DeleteJobRunsRequest(job_id=job, **fields))).runs


async def sql(ingestor, statement):
    await ingestor.app._store.write(lambda session: session.execute(text(statement)))


async def test_removed_runs_tell_which_they_were_and_who_removed_them(each_ingestor):
    for number in (1, 2):
        await open_run(each_ingestor.user(), number, fence=number, name="digits")
    assert [await remove(each_ingestor) for _ in range(2)] == [2, 0]  # the second one changes nothing
    await open_run(each_ingestor.user(), 3, job="other", name="words")
    await remove(each_ingestor, "other", launcher_id="here")
    found = await events(each_ingestor)
    assert [(event.kind, event.object_name, event.object_id) for event in found] == [
        ("Job", "digits", "job"),
        ("Job", "words", "other"),
    ]
    assert [event.message for event in found] == [
        f"2 runs deleted: {run_id(1)}, {run_id(2)}",
        f"1 runs deleted: {run_id(3)}",
    ]
    assert [event.actor for event in found] == ["user/127.0.0.1", "launcher/here"]
    assert [event.type for event in found] == ["RunsDeleted"] * 2


@pytest.mark.parametrize("table", ["metrics_event", "metrics_fence"])
async def test_neither_a_removal_nor_its_event_is_stored_without_the_other(each_ingestor, table):
    await open_run(each_ingestor.user())
    await append(each_ingestor.user(), points([1.0]))
    await sql(each_ingestor, f"ALTER TABLE {table} RENAME TO away")
    await refused(each_ingestor.user().DeleteJobRuns(pb.DeleteJobRunsRequest(job_id="job")))
    await sql(each_ingestor, f"ALTER TABLE away RENAME TO {table}")
    assert await events(each_ingestor) == []
    # The job was not closed: its run is there and takes more.
    assert await append(each_ingestor.user(), points([2.0], first=1)) == {"w": 2}
    assert await remove(each_ingestor) == 1
    assert [event.type for event in await events(each_ingestor)] == ["RunsDeleted"]


async def test_maintenance_by_a_user_tells_what_it_removed(ingestor):
    old = now_ns() - 10 * DAY_NS
    await open_run(ingestor.user(), 1, job="", fence=0, created_ns=old)
    await open_run(ingestor.user(), 2, job="job", created_ns=old, name="digits")
    await append(ingestor.user(), *(points([1.0], run=number) for number in (1, 2)), lines(["a"], run=2))
    await ingestor.restart(plain_run_ttl_s=5 * 86_400, log_ttl_s=5 * 86_400)
    freed = [(await ingestor.admin().Maintain(admin_pb2.MaintainRequest())).freed_bytes for _ in range(2)]
    assert await told(ingestor) == [
        ("RunsDeleted", "metrics", f"1 runs deleted: {run_id(1)}"),
        ("LogsDeleted", "digits", ""),
        (
            "Maintained",
            "metrics",
            f"{freed[0]:,} bytes freed; removed 1 old runs of plain processes; removed the logs of 1 old runs",
        ),
    ]


async def test_a_repair_is_told_before_files_change_and_when_it_is_done(ingestor):
    await open_run(ingestor.user(), name="digits")
    for first in range(3):
        await append(ingestor.user(), points([float(first)], first=first))
    await ingestor.restart()
    content = bytearray(ingestor.records(1).read_bytes())
    content[40] ^= 1
    ingestor.records(1).write_bytes(content)
    for repair in (False, True, True):  # the last one finds nothing
        _ = [answer async for answer in ingestor.admin().Verify(admin_pb2.VerifyRequest(repair=repair))]
    started, repaired = await told(ingestor)
    assert started[:2] == ("RepairStarted", "digits")
    assert f"run {run_id(1)}, journal-00000000.log at byte" in started[2]
    assert repaired[:2] == ("Repaired", "digits")
    assert "-> lost: " in repaired[2]


async def test_a_database_that_is_given_up_is_told(ingestor):
    await open_run(ingestor.user())
    await ingestor.stop()
    for path in ingestor.home.glob("metrics.db*"):
        path.unlink()
    await ingestor.start()
    for _ in range(2):
        _ = [answer async for answer in ingestor.admin().Verify(admin_pb2.VerifyRequest(repair=True))]
    ((kind, name, message),) = await told(ingestor)
    assert (kind, name) == ("Repaired", "metrics")
    assert "metrics.db was missing at the start" in message


async def test_a_backup_is_told_before_its_first_byte_and_after_its_last(ingestor):
    await open_run(ingestor.user())
    pieces = [piece async for piece in ingestor.admin().Backup(admin_pb2.BackupRequest())]
    size, files = sum(len(piece.data) for piece in pieces), len({piece.path for piece in pieces})
    assert await told(ingestor) == [
        ("BackupStarted", "metrics", ""),
        ("BackupTaken", "metrics", f"{size:,} bytes in {files:,} files"),
    ]
