"""What an operator asks: how much there is, whether it is whole, tidying up, copies, and how long things are kept."""

import sqlite3
import time
from contextlib import closing

import pytest
from servicekit.auth import AttemptTokens
from servicekit.errors import reason_of
from servicekit.ids import now_ns
from trainyard.channel import connect
from trainyard_protos.v1 import admin_pb2
from trainyard_protos.v1 import metrics_pb2 as pb
from trainyard_protos.v1.admin_pb2_grpc import MetricsAdminServiceStub

from services.metrics.tests.metrics_kit import (
    Ingestor,
    append,
    lines,
    open_run,
    points,
    refused,
    run_id,
    series,
    texts,
)

DAY_NS = 86_400 * 10**9


async def verify(ingestor, **options):
    answers = [answer async for answer in ingestor.admin().Verify(admin_pb2.VerifyRequest(**options))]
    assert answers[-1].checked == answers[-1].total
    return [answer.finding for answer in answers if answer.HasField("finding")]


def flip(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


async def counts(stub, job="job"):
    answer = await stub.ListSeries(pb.ListSeriesRequest(selector=pb.SeriesSelector(job_id=job)))
    return {info.name: info.count for info in answer.series}


async def test_usage_tells_bytes_by_kind_and_runs_by_workspace(ingestor):
    for number in (1, 2):
        await open_run(ingestor.user(), number, job=f"job-{number}")
        await append(ingestor.user(), points([1.0], run=number))
    answer = await ingestor.admin().GetUsage(admin_pb2.GetUsageRequest())
    usage = {(each.what, each.workspace): each for each in answer.usage}
    assert (usage["runs", "default"].count, usage["journals", ""].count) == (2, 2)
    assert usage["journals", ""].bytes == sum(ingestor.records(number).stat().st_size for number in (1, 2))
    assert usage["database", ""].bytes > 0
    assert answer.free_bytes > 0


async def test_what_is_whole_has_no_findings(ingestor):
    await open_run(ingestor.user())
    await append(ingestor.user(), points([1.0, 2.0]), lines(["a"]))
    assert await verify(ingestor) == []


async def test_damage_is_found_repaired_and_summaries_follow(ingestor):
    await open_run(ingestor.user(), 1)
    await open_run(ingestor.user(), 2, job="other")
    for first in range(3):
        await append(ingestor.user(), points([float(first)], first=first), points([1.0], first=first, run=2))
    await ingestor.restart()
    flip(ingestor.records(1), 40)
    (finding,) = await verify(ingestor)
    assert run_id(1) in finding.what
    assert not finding.repaired
    (repaired,) = await verify(ingestor, repair=True)
    assert repaired.repaired
    assert "record" in repaired.lost
    assert await verify(ingestor) == []
    assert await counts(ingestor.user()) == {"loss": 2}
    assert await counts(ingestor.user(), "other") == {"loss": 3}


async def test_a_database_that_is_missing_is_found_until_somebody_knows(ingestor):
    await open_run(ingestor.user())
    await append(ingestor.user(), points([1.0]))
    await ingestor.stop()
    for path in ingestor.home.glob("metrics.db*"):
        path.unlink()
    await ingestor.start()
    missing, unknown = await verify(ingestor)
    assert "metrics.db was missing at the start" in missing.what
    assert "backup" in missing.hint
    assert f"does not know 1 of the runs that have files: {run_id(1)}" in unknown.what
    await ingestor.restart()
    assert len(await verify(ingestor)) == 2
    assert [finding.repaired for finding in await verify(ingestor, repair=True)] == [True, False]
    assert len(await verify(ingestor)) == 1


async def test_a_database_that_is_removed_while_it_is_open_is_found(ingestor):
    (ingestor.home / "metrics.db").unlink()
    (finding,) = await verify(ingestor)
    assert "was removed or replaced" in finding.what


async def test_a_damaged_page_of_the_database_is_found(ingestor):
    await ingestor.stop()
    database = ingestor.home / "metrics.db"
    with closing(sqlite3.connect(database)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'metrics_run_newest'"
        offset = (connection.execute(query).fetchone()[0] - 1) * 4096
    content = bytearray(database.read_bytes())
    content[offset : offset + 64] = b"\xff" * 64
    database.write_bytes(content)
    await ingestor.start()
    assert any("metrics.db is damaged" in finding.what for finding in await verify(ingestor))


async def test_maintenance_removes_old_runs_of_plain_processes_alone(ingestor):
    old, new = now_ns() - 10 * DAY_NS, now_ns()
    await open_run(ingestor.user(), 1, job="", fence=0, created_ns=old)
    await open_run(ingestor.user(), 2, job="", fence=0, created_ns=new)
    await open_run(ingestor.user(), 3, job="job", created_ns=old)
    await append(ingestor.user(), *(points([1.0], run=number) for number in (1, 2, 3)))
    await ingestor.restart(plain_run_ttl_s=5 * 86_400)
    answer = await ingestor.admin().Maintain(admin_pb2.MaintainRequest())
    assert answer.done == ["removed 1 old runs of plain processes"]
    assert answer.freed_bytes > 0
    found = await ingestor.user().SearchRuns(pb.SearchRunsRequest())
    assert {each.run.id for each in found.runs} == {run_id(2), run_id(3)}
    assert not ingestor.records(1).parent.exists()


async def test_maintenance_removes_old_logs_and_keeps_points(ingestor):
    await open_run(ingestor.user(), created_ns=now_ns() - 10 * DAY_NS)
    await append(ingestor.user(), points([1.0, 2.0]), lines(["a", "b"]))
    await ingestor.restart(log_ttl_s=5 * 86_400)
    answer = await ingestor.admin().Maintain(admin_pb2.MaintainRequest())
    assert answer.done == ["removed the logs of 1 old runs"]
    assert await texts(ingestor.user()) == []
    assert list((await series(ingestor.user()))["loss", 0].value) == [1, 2]
    assert (await ingestor.admin().Maintain(admin_pb2.MaintainRequest())).done == []
    await append(ingestor.user(), lines(["c"], first=2))
    assert await texts(ingestor.user()) == ["c"]


async def test_a_run_that_is_written_is_never_old(ingestor):
    await ingestor.restart(plain_run_ttl_s=1)
    await open_run(ingestor.user(), 1, job="", fence=0, created_ns=1)
    call = ingestor.user().Append()
    await call.write(points([1.0]))
    await call.read()
    await ingestor.admin().Maintain(admin_pb2.MaintainRequest())
    assert len((await ingestor.user().SearchRuns(pb.SearchRunsRequest())).runs) == 1
    await call.done_writing()


async def test_nothing_is_removed_unless_it_is_set(ingestor):
    await open_run(ingestor.user(), 1, job="", fence=0, created_ns=1)
    await append(ingestor.user(), points([1.0]), lines(["a"]))
    await ingestor.restart()
    assert list((await ingestor.admin().Maintain(admin_pb2.MaintainRequest())).done) == []
    assert len((await ingestor.user().SearchRuns(pb.SearchRunsRequest())).runs) == 1


async def restore(ingestor, home, meanwhile=None):
    async for piece in ingestor.admin().Backup(admin_pb2.BackupRequest()):
        path = home / piece.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(piece.data)
        if meanwhile is not None:
            await meanwhile()
            meanwhile = None
    copy = Ingestor(home)
    await copy.start()
    return copy


async def test_a_backup_put_into_an_empty_home_has_everything(ingestor, tmp_path):
    await open_run(ingestor.user(), 1, params='{"lr": 0.5}')
    await open_run(ingestor.user(), 2, job="other")
    await append(ingestor.user(), points([1.0, 2.0]), lines(["hello"]), points([3.0], run=2, writer="other"))
    copy = await restore(ingestor, tmp_path / "copy")
    assert list((await series(copy.user()))["loss", 0].value) == [1, 2]
    assert await texts(copy.user()) == ["hello"]
    assert await counts(copy.user(), "other") == {"loss": 1}
    found = await copy.user().SearchRuns(pb.SearchRunsRequest(filter="params.lr = 0.5"))
    assert [each.run.id for each in found.runs] == [run_id(1)]
    await append(copy.user(), points([9.0], first=2))
    assert await counts(copy.user()) == {"loss": 3}
    await copy.stop()


async def test_what_is_written_during_a_backup_leaves_no_stale_summary(ingestor, tmp_path):
    for number in (1, 2):
        await open_run(ingestor.user(), number, job=f"job-{number}")
        await append(ingestor.user(), points([1.0] * 10, run=number))
    await ingestor.restart()

    async def write_more():
        for number in (1, 2):
            await append(ingestor.user(), points([2.0] * 5, first=10, run=number))

    copy = await restore(ingestor, tmp_path / "copy", write_more)
    for number in (1, 2):
        stored = (await series(copy.user(), f"job-{number}"))["loss", 0]
        assert await counts(copy.user(), f"job-{number}") == {"loss": len(stored.value)}
    await copy.stop()


@pytest.mark.parametrize("method", ["GetUsage", "Maintain", "Verify", "Backup"])
async def test_attempts_are_refused(ingestor, method):
    token, _ = AttemptTokens.load_or_create(ingestor.home).mint("default", "job", run_id(1), 1, 60)
    async with connect(f"127.0.0.1:{ingestor._port}", token) as channel:
        stub = MetricsAdminServiceStub(channel)
        request = getattr(admin_pb2, f"{method}Request")()
        call = getattr(stub, method)(request)
        error = await refused(call if method in ("GetUsage", "Maintain") else call.read())
    assert reason_of(error) == "UserOnly"


async def test_a_wall_clock_that_was_set_forward_makes_no_run_old(ingestor, monkeypatch):
    await open_run(ingestor.user(), 1, job="", fence=0)
    await append(ingestor.user(), points([1.0]))
    await ingestor.restart(plain_run_ttl_s=5 * 86_400)
    later = now_ns() + 10 * DAY_NS
    monkeypatch.setattr(time, "time_ns", lambda: later)
    assert (await ingestor.admin().Maintain(admin_pb2.MaintainRequest())).done == []
