"""Runs are removed as a user asks: all that is stored of them, or nothing, and never what is written."""

import json

import pytest
from trainyard_protos.v1 import admin_pb2
from trainyard_protos.v1 import metrics_pb2 as pb

from services.metrics.tests.metrics_kit import append, lines, open_run, points, refused, run_id
from services.metrics.tests.test_metrics_append import reason_of


async def remove(ingestor, *numbers, dry_run=False):
    request = pb.DeleteRunsRequest(run_ids=[run_id(number) for number in numbers], dry_run=dry_run)
    return (await ingestor.user().DeleteRuns(request)).bytes


async def runs(ingestor):
    return [run.id for run in (await ingestor.user().ListRuns(pb.ListRunsRequest())).runs]


async def close(ingestor, number, *, undelivered=()):
    request = pb.CloseAttemptRequest(
        job_id="job", attempt_id=run_id(number), fence=number, undelivered_writers=undelivered
    )
    await ingestor.user().CloseAttempt(request)


def on_disk(ingestor, number):
    folder = ingestor.home / "runs" / run_id(number)
    return sum(path.stat().st_blocks * 512 for path in (folder, *folder.iterdir()))


async def test_a_run_of_a_plain_process_is_removed_with_its_files(each_ingestor):
    for number in (1, 2):
        await open_run(each_ingestor.user(), number, job="", fence=0, name="plain")
        await append(each_ingestor.user(), points([1.0], run=number))
    said = await remove(each_ingestor, 1, dry_run=True)
    assert said.journals + said.other == on_disk(each_ingestor, 1)
    assert len(await runs(each_ingestor)) == 2
    assert await remove(each_ingestor, 1) == said
    assert await runs(each_ingestor) == [run_id(2)]
    assert [path.name for path in (each_ingestor.home / "runs").iterdir()] == [run_id(2)]
    assert reason_of(await refused(remove(each_ingestor, 1))) == "RunNotFound"
    [event] = (await each_ingestor.admin().ListAdminEvents(admin_pb2.ListAdminEventsRequest())).events
    assert (event.kind, event.object_id, event.object_name) == ("Run", run_id(1), "plain")


async def test_runs_of_a_job_go_together_and_once_its_attempts_are_over(each_ingestor):
    for number in (1, 2):
        await open_run(each_ingestor.user(), number, fence=number, name="digits")
    assert reason_of(await refused(remove(each_ingestor, 1, 2))) == "RunIsWritten"
    await close(each_ingestor, 2, undelivered=["w"])
    assert reason_of(await refused(remove(each_ingestor, 1, 2))) == "RunIsWritten"
    await close(each_ingestor, 2)
    for some in ((1,), (2,)):
        assert reason_of(await refused(remove(each_ingestor, *some))) == "PartOfSeries"
    await remove(each_ingestor, 1, 2)
    assert await runs(each_ingestor) == []
    await open_run(each_ingestor.user(), 3, fence=3, name="digits")  # a retry of the job continues as before
    assert await runs(each_ingestor) == [run_id(3)]


@pytest.mark.parametrize("until", ["files", "rows"])
async def test_a_removal_that_is_cut_short_is_completed_at_the_next_start(each_ingestor, monkeypatch, until):
    """Killed before the files went, or between the files and the rows."""
    await open_run(each_ingestor.user(), 1, job="", fence=0)
    await append(each_ingestor.user(), points([1.0]))
    removal = each_ingestor.app._removal

    async def killed(*_):
        raise OSError("killed")

    discard = removal._logs.discard

    async def killed_after(run):
        await discard(run)
        raise OSError("killed")

    monkeypatch.setattr(removal._logs, "discard", killed if until == "files" else killed_after)
    await refused(remove(each_ingestor, 1))
    assert await runs(each_ingestor) == [run_id(1)]
    await each_ingestor.restart()
    assert await runs(each_ingestor) == []
    assert not list((each_ingestor.home / "runs").iterdir())


async def test_a_run_that_is_written_is_not_removed(each_ingestor):
    await open_run(each_ingestor.user(), 1, job="", fence=0)
    call = each_ingestor.user().Append()
    await call.write(points([1.0]))
    await call.read()
    assert reason_of(await refused(remove(each_ingestor, 1))) == "RunIsWritten"
    await call.done_writing()


async def test_what_the_runs_of_a_job_take_is_said_without_removing_them(each_ingestor):
    await open_run(each_ingestor.user(), 1, name="digits", params=json.dumps({"lr": 1}))
    await append(each_ingestor.user(), lines(["a"] * 10))
    answer = await each_ingestor.user().DeleteJobRuns(pb.DeleteJobRunsRequest(job_id="job", dry_run=True))
    assert (answer.runs, answer.bytes.journals > 0, await runs(each_ingestor)) == (1, True, [run_id(1)])
    assert await append(each_ingestor.user(), lines(["b"], first=10)) == {"node-0": 11}
