"""Finding runs, reading one, and naming them."""

import asyncio
import json
import sys
from typing import Any

import grpc
import pytest
from trainyard import errors
from trainyard.client import AsyncClient
from trainyard_protos.v1 import artifacts_pb2, metrics_pb2

from libs.trainyard.tests.client.scripted import JOB_ID, Refusal, ScriptedYard, job, line

PLAIN = "01939a7e-0000-7000-8000-00000000aaaa"
ATTEMPT = "01939a7e-0000-7000-8000-00000000bbbb"
NO_JOB = Refusal(grpc.StatusCode.NOT_FOUND, "no such job", "JobNotFound")


def found(identifier: str, name: str = "script", **fields: Any) -> metrics_pb2.FoundRun:
    return metrics_pb2.FoundRun(run=metrics_pb2.Run(id=identifier, name=name, **fields), updated_ns=5)


async def test_found_runs_are_plain_values_page_after_page(yard: ScriptedYard) -> None:
    yard.runs = [found(f"r{number}", params='{"lr": 0.1}', tags={"team": "vision"}) for number in range(5)]
    for each in yard.runs:
        each.last_value.extend([0.5, 0.0])
        each.last_step.extend([7, 0])
        each.count.extend([3, 0])
    async with AsyncClient() as client:
        runs = [run async for run in client.runs(names=["loss", "missing"])]
    assert [run.id for run in runs] == ["r0", "r1", "r2", "r3", "r4"]
    assert (runs[0].params, runs[0].tags) == ({"lr": 0.1}, {"team": "vision"})
    assert (runs[0].values, runs[0].steps) == ({"loss": 0.5}, {"loss": 7})


async def test_a_limit_ends_the_search(yard: ScriptedYard) -> None:
    yard.runs = [found(f"r{number}") for number in range(5)]
    async with AsyncClient() as client:
        assert len([run async for run in client.runs(limit=3)]) == 3
    assert len(yard.asked("SearchRuns")) == 2


async def test_a_jobs_run_is_that_of_its_newest_attempt_with_the_jobs_values(yard: ScriptedYard) -> None:
    yard.job.CopyFrom(job("succeeded", attempt=2, attempt_id=ATTEMPT))
    yard.runs = [found(ATTEMPT, "digits", job_id=JOB_ID, fence=2, context=json.dumps({"host": "x"}))]
    yard.series = [
        metrics_pb2.SeriesInfo(name="loss", rank=1, last_value=2.0, last_step=3),
        metrics_pb2.SeriesInfo(name="loss", rank=0, last_value=1.0, last_step=3),
    ]
    async with AsyncClient() as client:
        run = await client.run("digits")
    assert (run.id, run.attempt, run.context) == (ATTEMPT, 2, {"host": "x"})
    assert (run.values, run.steps) == ({"loss": 1.0}, {"loss": 3})
    assert yard.asked("ListSeries")[0].selector.job_id == JOB_ID


async def test_a_job_that_never_began_has_no_run(yard: ScriptedYard) -> None:
    yard.job.CopyFrom(job("queued", attempt=0))
    async with AsyncClient() as client:
        with pytest.raises(errors.NotFound, match="has no run yet") as missing:
            await client.run("digits")
    assert missing.value.hint == f"yard explain {JOB_ID}"


@pytest.mark.parametrize("handle", [PLAIN, PLAIN[:-2], "script"])
async def test_a_plain_script_is_found_by_id_prefix_and_name(yard: ScriptedYard, handle: str) -> None:
    yard.refusals["GetJob"] = [NO_JOB]
    yard.runs = [found(PLAIN), found(ATTEMPT, "other")]
    async with AsyncClient() as client:
        run = await client.run(handle)
    assert run.id == PLAIN
    assert yard.asked("ListSeries")[0].selector.run_id == PLAIN


async def test_what_is_neither_job_nor_run_is_not_found(yard: ScriptedYard) -> None:
    yard.refusals["GetJob"] = [NO_JOB]
    async with AsyncClient() as client:
        with pytest.raises(errors.NotFound, match="no job or run 'nothing'"):
            await client.run("nothing")


async def test_several_runs_of_one_name_are_told_apart_by_their_ids(yard: ScriptedYard) -> None:
    yard.refusals["GetJob"] = [NO_JOB]
    yard.runs = [found(PLAIN), found(ATTEMPT)]
    async with AsyncClient() as client:
        with pytest.raises(errors.Conflict, match=PLAIN) as several:
            await client.series("script")
    assert several.value.reason == "AmbiguousRun"


async def test_names_are_quoted_in_the_search(yard: ScriptedYard) -> None:
    yard.refusals["GetJob"] = [NO_JOB]
    async with AsyncClient() as client:
        with pytest.raises(errors.NotFound):
            await client.run('a" or name != "\\')
    assert yard.asked("SearchRuns")[0].filter == 'name = "a\\" or name != \\"\\\\"'


async def test_runs_are_compared_with_their_code(yard: ScriptedYard) -> None:
    git = [{"git": {"commit": "a", "diff_artifact": "digits-diff@1"}}, {"git": {"commit": "b", "diff": "+x\n"}}]
    yard.runs = [found(PLAIN, context=json.dumps(git[0])), found(ATTEMPT, context=json.dumps(git[1]))]
    yard.files["digits-diff@1/diff.patch"] = b"+y\n"
    yard.refusals["GetJob"] = [NO_JOB, NO_JOB]
    async with AsyncClient() as client:
        comparison = await client.compare([PLAIN, ATTEMPT])
    assert comparison.diffs == ("+y\n", "+x\n")
    assert {(row.part, row.name) for row in comparison.rows} == {("git", "commit"), ("git", "diff")}


@pytest.mark.parametrize("recorded", [True, False])
async def test_code_is_compared_by_digest_and_by_file(yard: ScriptedYard, recorded: bool) -> None:
    for run, name, content in ((PLAIN, "d@1", b"1"), (ATTEMPT, "d@2", b"2")):
        detail = artifacts_pb2.VersionDetail(
            version=artifacts_pb2.Version(id=f"id-{name}", name="d", number=int(name[-1]), digest=content * 32)
        )
        for path, chunk in (("train.py", content), ("same.py", b"0")):
            detail.manifest.files.add(path=path, mode=0o644).chunks.add(hash=chunk * 32, size=1)
        yard.details |= {name: detail, f"id-{name}": detail}
        code = {"artifact": name, "version": f"id-{name}", "digest": (content * 32).hex()}
        context, spec = ({"code": code}, {}) if recorded else ({}, {"code": {"artifact": name}})
        yard.runs.append(found(run, context=json.dumps(context), spec=json.dumps(spec)))
    yard.refusals["GetJob"] = [NO_JOB, NO_JOB]
    async with AsyncClient() as client:
        rows = (await client.compare([PLAIN, ATTEMPT])).rows
    assert {f"{row.part}.{row.name}" for row in rows} == {"code.digest", "code.files.train.py"}
    assert rows[0].values == ("31" * 6, "32" * 6)


async def test_a_diff_that_was_deleted_does_not_keep_runs_from_being_compared(yard: ScriptedYard) -> None:
    yard.runs = [found(PLAIN, context='{"git": {"diff_artifact": "gone@1"}}'), found(ATTEMPT)]
    yard.refusals["GetJob"] = [NO_JOB, NO_JOB]
    async with AsyncClient() as client:
        assert (await client.compare([PLAIN, ATTEMPT])).diffs == ("", "")


async def test_one_run_alone_is_not_compared(yard: ScriptedYard) -> None:
    async with AsyncClient() as client:
        with pytest.raises(errors.InvalidArgument, match="two or more"):
            await client.compare(["digits"])


async def test_a_handle_of_a_job_asks_for_nothing_but_the_answer(yard: ScriptedYard) -> None:
    async with AsyncClient() as client:
        handle = await client.job("digits")
        yard.calls.clear()
        await asyncio.gather(handle.values(), handle.metrics("loss"))
    assert {name for name, _ in yard.calls} == {"ListSeries", "QuerySeries"}


async def test_series_and_lines_become_data_frames_of_the_same_values(
    yard: ScriptedYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.series = [metrics_pb2.SeriesInfo(name="loss", last_value=0.1), metrics_pb2.SeriesInfo(name="lr", last_value=2)]
    yard.stored = [metrics_pb2.StoredLine(attempt=1, line=line(number, f"line {number}")) for number in range(3)]
    async with AsyncClient() as client:
        series, lines = await client.metrics(JOB_ID), [each async for each in client.logs(JOB_ID)]
        points = [
            (each.name, step, value) for each in series for step, value in zip(each.step, each.value, strict=True)
        ]
        assert list(series.df()[["name", "step", "value"]].itertuples(index=False, name=None)) == points
        assert (await (await client.job(JOB_ID)).metrics()).df().equals(series.df())
        frame = await client.logs(JOB_ID).df()
        assert list(frame[["seq", "text"]].itertuples(index=False, name=None)) == [
            (each.line.seq, each.line.text) for each in lines
        ]
        monkeypatch.setitem(sys.modules, "pandas", None)
        with pytest.raises(errors.InvalidArgument, match="pandas") as caught:
            series.df()
        assert "trainyard[pandas]" in caught.value.hint
