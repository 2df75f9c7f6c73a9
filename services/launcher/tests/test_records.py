"""What an attempt printed and tracked reaches metrics, however long metrics or the launcher was away; its token stores
nothing after its end."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from launcher_yard import WAIT_S, Yard, running_yard
from servicekit.errors import reason_of
from servicekit.ids import new_id
from trainyard.channel import connect
from trainyard_launcher.backends.process import ProcessBackend
from trainyard_launcher.backends.process.agents import AGENT
from trainyard_launcher.backends.process.folders import AttemptFolder
from trainyard_protos.v1 import artifacts_pb2, artifacts_pb2_grpc, metrics_pb2, metrics_pb2_grpc, scheduler_pb2

TRACK = """
import os, sys, time
from trainyard import tracker
rank = int(os.environ["TRAINYARD_RANK"])
for step in range(100):
    tracker.log({f"loss/{rank}": step}, step=step)
    print("line", step, "of", rank, flush=True)
print("the end of", rank, flush=True)
"""
FAIL = [sys.executable, "-c", TRACK + "sys.exit(1)"]
# The node that fails waits for its peer; the peer runs until it is stopped.
FAIL_IN_A_GANG = """
if rank == 1:
    open(os.environ["MARK"], "w").close()
    time.sleep(3600)
while not os.path.exists(os.environ["MARK"]):
    time.sleep(0.01)
sys.exit(1)
"""


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with running_yard(tmp_path, agent=AGENT, records=True, finalize_timeout_s=0.2) as yard:
        yard.gate.closed = True
        yield yard


@pytest.fixture
async def whole_yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with running_yard(tmp_path, agent=AGENT, records=True) as yard:
        yield yard


async def ended(yard: Yard, attempt: str) -> scheduler_pb2.ReportAttemptRequest:
    """The end of an attempt, as the scheduler hears of it."""
    yard.send_launch(attempt)
    return await yard.scheduler.ended(attempt)


async def closed(yard: Yard, attempt: str) -> None:
    """Waits until every service knows the end of an attempt."""
    await until((yard.home / "attempts" / attempt / "over").exists)


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not happened():
            await asyncio.sleep(0.02)


async def delivered(yard: Yard, attempt: str, ranks: int = 1) -> None:
    """Waits for the delivery, and checks that everything of each rank is stored once and in order."""
    await closed(yard, attempt)
    await until(lambda: not undelivered(yard, attempt))
    stub = metrics_pb2_grpc.MetricsServiceStub(yard.channel)
    pages = [page async for page in stub.ReadLogs(metrics_pb2.ReadLogsRequest(run_id=attempt))]
    lines = [stored.line for page in pages for stored in page.lines if stored.line.stream == "output"]
    for rank in range(ranks):
        texts = [line.text for line in lines if line.rank == rank]
        assert texts == [*(f"line {step} of {rank}" for step in range(100)), f"the end of {rank}"]
        selector = metrics_pb2.SeriesSelector(run_id=attempt, names=[f"loss/{rank}"])
        [series] = (await stub.QuerySeries(metrics_pb2.QuerySeriesRequest(selector=selector))).series
        assert list(series.step) == list(range(100)) and list(series.value) == list(map(float, range(100)))


def undelivered(yard: Yard, attempt: str) -> list[str]:
    return sorted(path.name for path in (yard.home / "attempts" / attempt).glob("undelivered-*"))


async def test_records_of_a_failed_attempt_are_delivered_when_metrics_is_back(yard: Yard) -> None:
    attempt = yard.assign(FAIL)
    exit = (await ended(yard, attempt)).exit
    assert (exit.reason, exit.acknowledged) == ("WorkerFailed", False)
    assert (exit.unacknowledged_rows, exit.unacknowledged_lines >= 101) == (100, True)
    assert [note.attempt_id for note in yard.scheduler.notes("RecordsDelayed")] == [attempt]
    assert undelivered(yard, attempt) == ["undelivered-0"]
    yard.gate.closed = False
    await delivered(yard, attempt)


@pytest.mark.parametrize("over", [False, True])
async def test_the_next_launcher_delivers_what_the_one_before_could_not(yard: Yard, over: bool) -> None:
    """Whether the one before had closed the attempt, or not yet."""
    attempt = yard.assign(FAIL)
    await ended(yard, attempt)
    await yard.close()
    if over:
        (yard.home / "attempts" / attempt / "over").touch()
    (yard.node(attempt) / "token").write_text("one that has expired")
    yard.gate.closed = False
    await yard.open()
    await delivered(yard, attempt)


async def test_a_full_disk_that_takes_no_mark_of_the_end_keeps_no_records(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_folder: AttemptFolder) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(AttemptFolder, "mark_over", fail)
    attempt = yard.assign(FAIL)
    await ended(yard, attempt)
    yard.gate.closed = False
    await until(lambda: not undelivered(yard, attempt))


async def test_records_of_all_nodes_are_delivered_when_one_of_them_failed(yard: Yard, tmp_path: Path) -> None:
    code = TRACK + FAIL_IN_A_GANG
    attempt = yard.assign([sys.executable, "-c", code], nodes=2, env={"MARK": str(tmp_path / "mark")})
    exit = (await ended(yard, attempt)).exit
    assert (exit.reason, exit.node) == ("WorkerFailed", 0)
    assert undelivered(yard, attempt) == ["undelivered-0", "undelivered-1"]
    yard.gate.closed = False
    await delivered(yard, attempt, ranks=2)


@pytest.mark.parametrize("killed", [False, True])
async def test_records_that_go_with_their_node_are_told_as_lost(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """As with a pod, whose folder goes with it."""
    monkeypatch.setattr(ProcessBackend, "keeps_records", False)
    yard.gate.closed = not killed
    code = TRACK + "open(os.environ['MARK'], 'w').close(); " + ("time.sleep(3600)" if killed else "sys.exit(1)")
    attempt = yard.assign([sys.executable, "-c", code], env={"MARK": str(tmp_path / "mark")})
    yard.send_launch(attempt)
    if killed:
        await yard.scheduler.until(lambda: "started" in yard.scheduler.phases(attempt))
        os.kill(json.loads((yard.node(attempt) / "started").read_text())["pid"], signal.SIGKILL)
    await yard.scheduler.ended(attempt)
    [note] = yard.scheduler.notes("RecordsLost")
    what = "died without a word, are lost" if killed else "100 rows are lost: metrics did not take them in time"
    assert what in note.note


async def test_what_is_forgotten_is_not_delivered_any_more(yard: Yard) -> None:
    attempt = yard.assign(FAIL)
    job = yard.job_of(attempt)
    await ended(yard, attempt)
    yard.send_forget(job, [attempt])
    await until(lambda: not (yard.home / "attempts" / attempt).exists())
    yard.gate.closed = False
    after = yard.assign(FAIL)
    await ended(yard, after)
    await delivered(yard, after)
    await yard.removed()
    assert await runs(yard) == [after]


async def test_runs_are_removed_when_metrics_is_back_also_by_the_next_launcher(yard: Yard) -> None:
    """The launcher is told once, and metrics is away just then."""
    yard.gate.closed = False
    attempt = yard.assign(["true"])
    job = yard.job_of(attempt)
    await ended(yard, attempt)
    assert await runs(yard) == [attempt]
    yard.gate.closed = True
    yard.send_forget(job, [attempt])
    await until(lambda: not (yard.home / "attempts" / attempt).exists())
    await yard.close()
    yard.gate.closed = False
    await yard.open()
    await yard.removed()
    assert await runs(yard) == []


async def test_the_scheduler_is_told_of_which_jobs_there_are_folders_and_runs(yard: Yard) -> None:
    """And of no run that a user opened. Metrics is away at first."""
    yard.gate.closed = False
    attempt = yard.assign(["true"])
    job = yard.job_of(attempt)
    await ended(yard, attempt)
    await closed(yard, attempt)
    run = metrics_pb2.Run(id=new_id(), job_id=new_id(), fence=1)
    await metrics_pb2_grpc.MetricsServiceStub(yard.channel).OpenRun(metrics_pb2.OpenRunRequest(run=run))
    await yard.close()
    yard.scheduler.holdings.clear()
    yard.gate.closed = True
    await yard.open()
    folder = scheduler_pb2.Tombstone(workspace="default", job_id=job, pool=yard.settings.pool, attempt_ids=[attempt])
    await yard.scheduler.until(lambda: bool(yard.scheduler.holdings))
    yard.gate.closed = False
    runs = scheduler_pb2.Tombstone(workspace="default", job_id=job)
    await yard.scheduler.until(lambda: runs in [each.place for each in yard.scheduler.holdings])
    assert {each.database_id for each in yard.scheduler.holdings} == {"database-1"}
    assert all(each.place in (folder, runs) for each in yard.scheduler.holdings)


async def runs(yard: Yard) -> list[str]:
    stub = metrics_pb2_grpc.MetricsServiceStub(yard.channel)
    return [run.id for run in (await stub.ListRuns(metrics_pb2.ListRunsRequest(workspace="default"))).runs]


async def test_nothing_is_stored_with_the_token_of_an_attempt_that_is_over(whole_yard: Yard) -> None:
    """Also when a service was away at its end, and the launcher began anew before it was back."""
    yard = whole_yard
    yard.store_gate.closed = True
    attempt = yard.assign(FAIL)
    facts = ("default", yard.job_of(attempt), attempt, 1)
    await ended(yard, attempt)
    await yard.restart()
    yard.store_gate.closed = False
    await closed(yard, attempt)
    token, _ = yard.tokens.mint(*facts, ttl_s=600)
    async with connect(f"127.0.0.1:{yard.port}", token) as channel:
        metrics = metrics_pb2_grpc.MetricsServiceStub(channel)
        artifacts = artifacts_pb2_grpc.ArtifactServiceStub(channel)
        for call in (
            metrics.OpenRun(metrics_pb2.OpenRunRequest(run=metrics_pb2.Run(id=attempt))),
            artifacts.Commit(artifacts_pb2.CommitRequest(name="model", kind="model")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert reason_of(caught.value) == "AttemptEnded"


async def test_an_attempt_goes_on_while_the_yard_is_away_for_three_lifetimes_of_its_token(
    whole_yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = TRACK + 'import pathlib\nwhile not pathlib.Path(os.environ["MARK"]).exists(): time.sleep(0.01)'
    yard = whole_yard
    attempt = await yard.run([sys.executable, "-c", code], env={"MARK": str(tmp_path / "mark")})
    await yard.close()
    now, away_s = time.time, 3 * yard.settings.token_ttl_s
    monkeypatch.setattr(time, "time", lambda: now() + away_s)
    await yard.open()
    (tmp_path / "mark").touch()
    exit = (await yard.scheduler.ended(attempt)).exit
    assert (exit.reason, exit.acknowledged) == ("Completed", True)
    await delivered(yard, attempt)
