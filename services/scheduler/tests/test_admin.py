"""What an operator asks of the scheduler: how much it stores, and a copy of it."""

from pathlib import Path

import grpc
import pytest
from servicekit.errors import reason_of
from sqlalchemy import text
from trainyard.channel import connect
from trainyard_protos.v1 import admin_pb2 as a
from trainyard_protos.v1 import admin_pb2_grpc
from trainyard_protos.v1 import scheduler_pb2 as s
from trainyard_scheduler import ledger

from services.scheduler.tests.conftest import OpenYard, open_yard
from services.scheduler.tests.yard import Yard, document


def admin(yard: Yard) -> admin_pb2_grpc.SchedulerAdminServiceStub:
    return admin_pb2_grpc.SchedulerAdminServiceStub(yard.channel)


async def test_usage_counts_what_is_stored_by_workspace(yard: Yard) -> None:
    await yard.submit(document("one"))
    await yard.submit(document("two"))
    answer = await admin(yard).GetUsage(a.GetUsageRequest())
    counts = {(each.what, each.workspace): each.count for each in answer.usage}
    assert counts[("jobs", "default")] == 2
    assert counts[("events", "default")] == 2
    assert next(each.bytes for each in answer.usage if each.what == "database") > 4096
    assert answer.free_bytes > 0


async def test_a_backup_in_an_empty_home_is_the_same_scheduler(tmp_path: Path) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy"
    copy.mkdir()
    async with open_yard(home, database_url="") as yard:
        submitted = await yard.submit(document("kept"))
        pieces = [piece async for piece in admin(yard).Backup(a.BackupRequest())]
        await yard.submit(document("later"))
    assert {piece.path for piece in pieces} == {"scheduler.db"}
    (copy / "scheduler.db").write_bytes(b"".join(piece.data for piece in pieces))
    async with open_yard(copy, database_url="") as restored:
        jobs = (await restored.users.ListJobs(s.ListJobsRequest())).jobs
        assert [job.id for job in jobs] == [submitted.id]


async def told(yard: Yard) -> list[tuple[str, str, str, str]]:
    return [(event.type, event.object_name, event.actor, event.message) for event in await yard.events()]


async def test_a_backup_is_told_before_its_first_byte_and_after_its_last(tmp_path: Path) -> None:
    async with open_yard(tmp_path, database_url="") as yard:
        size = sum([len(piece.data) async for piece in admin(yard).Backup(a.BackupRequest())])
        started = ("BackupStarted", "scheduler", "user/127.0.0.1", "")
        taken = ("BackupTaken", "scheduler", "user/127.0.0.1", f"{size:,} bytes in 1 files")
        assert await told(yard) == [started, taken]


async def test_a_lost_database_that_is_given_up_is_told_once(tmp_path: Path) -> None:
    async with open_yard(tmp_path, database_url="") as yard:
        await yard.submit()
    (tmp_path / "scheduler.db").unlink()
    async with open_yard(tmp_path, database_url="") as yard:
        await findings(yard)
        assert await told(yard) == []
        for _ in range(2):
            await findings(yard, repair=True)
        ((kind, name, actor, message),) = await told(yard)
    assert (kind, name, actor) == ("Repaired", "scheduler", "user/127.0.0.1")
    assert "scheduler.db was missing at the start" in message


async def test_events_that_no_job_takes_with_it_are_bounded(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that a test reaches."""
    monkeypatch.setattr(ledger, "KEPT", 3)
    await yard.submit()
    for cpu in (1, 2, 3, 4, 5):
        await yard.register(cpu=cpu, lease_s=60 + cpu)
        await yard.scheduler.record_shutdown("user/127.0.0.1", f"{cpu}")
    others = [(event.type, event.message) for event in await yard.events() if event.kind != "Job"]
    assert [kind for kind, _ in others] == ["ShutdownRequested", "PoolRegistered", "ShutdownRequested"]
    assert [message for kind, message in others if kind == "ShutdownRequested"] == ["4", "5"]
    assert "Submitted" in {event.type for event in await yard.events()}


async def test_neither_a_repair_nor_its_event_is_stored_without_the_other(tmp_path: Path) -> None:
    async with open_yard(tmp_path, database_url="") as yard:
        await yard.submit()
    (tmp_path / "scheduler.db").unlink()
    async with open_yard(tmp_path, database_url="") as yard:
        await yard.scheduler._store.write(lambda session: session.execute(text("ALTER TABLE events RENAME TO away")))
        with pytest.raises(grpc.aio.AioRpcError):
            await findings(yard, repair=True)
        await yard.scheduler._store.write(lambda session: session.execute(text("ALTER TABLE away RENAME TO events")))
        assert len(await findings(yard)) == 1
        assert await told(yard) == []


async def findings(yard: Yard, **options: bool) -> list[a.VerifyResponse.Finding]:
    answers = [answer async for answer in admin(yard).Verify(a.VerifyRequest(**options))]
    assert (answers[-1].checked, answers[-1].total) == (1, 1)
    return [answer.finding for answer in answers if answer.HasField("finding")]


async def test_a_missing_database_is_found(tmp_path: Path) -> None:
    async with open_yard(tmp_path, database_url="") as yard:
        await yard.submit()
        assert await findings(yard) == []
    (tmp_path / "scheduler.db").unlink()
    async with open_yard(tmp_path, database_url="") as yard:
        (finding,) = await findings(yard)
        assert "scheduler.db was missing at the start" in finding.what
        assert "backup" in finding.hint
        (tmp_path / "scheduler.db").unlink()
        (finding,) = await findings(yard)
        assert "was removed or replaced" in finding.what


async def test_a_database_that_was_put_back_is_sound(tmp_path: Path) -> None:
    async with open_yard(tmp_path, database_url="") as yard:
        await yard.submit()
    (tmp_path / "scheduler.db").rename(tmp_path / "kept")
    async with open_yard(tmp_path, database_url="") as yard:
        assert len(await findings(yard)) == 1
    (tmp_path / "kept").rename(tmp_path / "scheduler.db")
    async with open_yard(tmp_path, database_url="") as yard:
        assert await findings(yard) == []


async def test_on_postgresql_a_backup_says_what_to_use(
    tmp_path: Path, open_scheduler: OpenYard, postgres_url: str
) -> None:
    async with open_scheduler(tmp_path, database_url=postgres_url) as yard:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            _ = [piece async for piece in admin(yard).Backup(a.BackupRequest())]
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(refused.value) == "NotSqlite"


async def test_attempts_may_ask_for_neither(yard: Yard) -> None:
    token, _ = yard.tokens.mint("default", "job", "attempt", 1, 60)
    async with connect(f"127.0.0.1:{yard.port}", token) as channel:
        stub = admin_pb2_grpc.SchedulerAdminServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as usage:
            await stub.GetUsage(a.GetUsageRequest())
        with pytest.raises(grpc.aio.AioRpcError) as backup:
            _ = [piece async for piece in stub.Backup(a.BackupRequest())]
    assert {usage.value.code(), backup.value.code()} == {grpc.StatusCode.PERMISSION_DENIED}
