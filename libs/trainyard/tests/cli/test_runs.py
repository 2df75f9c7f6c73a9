"""Commands about runs: list, show, compare; series and logs of runs that no job has."""

import json

import grpc
import pytest
from trainyard_protos.v1 import metrics_pb2

from libs.trainyard.tests.cli.commandline import run
from libs.trainyard.tests.client.scripted import JOB_ID, Refusal, ScriptedYard, job, line, lines, started

FIRST = "01939a7e-0000-7000-8000-00000000aaaa"
SECOND = "01949a7e-0000-7000-8000-00000000bbbb"
DIFF = "diff --git a/train.py b/train.py\n--- a/train.py\n+++ b/train.py\n@@ -1 +1 @@\n-print(1)\n+print({})\n"


def found(identifier: str, *, context: object = None, **fields: object) -> metrics_pb2.FoundRun:
    given = {"name": "script", "created_ns": 1, "params": '{"lr": 0.1}', "context": json.dumps(context or {}), **fields}
    return metrics_pb2.FoundRun(run=metrics_pb2.Run(id=identifier, **given), updated_ns=2)  # type: ignore[arg-type]


@pytest.fixture
def plain(yard: ScriptedYard) -> ScriptedYard:
    """Two runs of plain scripts, which no job is called like."""
    yard.refusals["GetJob"] = [Refusal(grpc.StatusCode.NOT_FOUND, "no such job", "JobNotFound")] * 4
    git = {"commit": "abc", "branch": "main", "remote": "", "dirty": True}
    yard.runs = [
        found(FIRST, context={"host": "here", "git": git | {"diff": DIFF.format(2)}}),
        found(SECOND, params='{"lr": 0.2}', context={"host": "here", "git": git | {"diff": DIFF.format(3)}}),
    ]
    return yard


async def test_runs_are_listed_with_the_values_asked_for(yard: ScriptedYard) -> None:
    yard.runs = [found(FIRST), found(SECOND)]
    for each, count in zip(yard.runs, (3, 0), strict=True):
        each.last_value.append(0.25)
        each.last_step.append(7)
        each.count.append(count)
    ended = await run("runs", "list", "params.lr < 1", "-m", "loss", "--order-by", "metrics.loss", "--limit", "2")
    assert ended.code == 0
    assert ended.lines[0].split() == ["ID", "NAME", "JOB", "ATTEMPT", "AGE", "LAST", "POINT", "loss"]
    assert ended.lines[1].startswith(FIRST[:18])
    assert [row.split()[-1] for row in ended.lines[1:3]] == ["0.25", "-"]
    request = yard.asked("SearchRuns")[0]
    assert (request.filter, request.order_by, list(request.names)) == ("params.lr < 1", "metrics.loss", ["loss"])


async def test_a_wrong_filter_is_told_with_its_place(yard: ScriptedYard) -> None:
    yard.refusals["SearchRuns"] = [Refusal(grpc.StatusCode.INVALID_ARGUMENT, "column 3: no field 'lr'", "BadFilter")]
    ended = await run("runs", "list", "lr < 1")
    assert (ended.code, "column 3: no field 'lr'" in ended.err) == (2, True)


async def test_a_run_is_shown_whole(plain: ScriptedYard) -> None:
    plain.series = [
        metrics_pb2.SeriesInfo(name="loss", last_value=0.5, last_step=9),
        metrics_pb2.SeriesInfo(name="system/cpu", last_value=1.0),
    ]
    ended = await run("runs", "show", FIRST)
    for text in (FIRST, "lr", "0.1", "commit", "abc", "host", "here", "0.5 (step 9)"):
        assert text in ended.out
    assert "system/cpu" not in ended.out
    assert "print(2)" not in ended.out
    assert "print(2)" in (await run("runs", "show", FIRST, "-o", "wide")).out


async def test_a_run_for_programs_has_plain_fields(plain: ScriptedYard) -> None:
    plain.series = [metrics_pb2.SeriesInfo(name="loss", last_value=float("nan"), last_step=9)]
    shown = json.loads((await run("runs", "show", FIRST, "-o", "json")).out)
    assert (shown["id"], shown["createdNs"], shown["params"]) == (FIRST, 1, {"lr": 0.1})
    assert shown["values"] == {"loss": "NaN"}


async def test_a_comparison_is_a_table_of_what_differs_and_the_change_of_code(plain: ScriptedYard) -> None:
    ended = await run("compare", FIRST, SECOND)
    assert ended.code == 0
    rows = {row.split()[0]: row.split()[1:] for row in ended.lines[1:3]}
    assert rows["params.lr"] == ["0.1", "0.2"]
    assert "git.diff" in rows
    assert "host" not in ended.out
    assert ended.lines[-2:] == ["-+print(2)", "++print(3)"]


async def test_all_shows_what_is_the_same_too(plain: ScriptedYard) -> None:
    assert "context.host" in (await run("compare", FIRST, SECOND, "--all")).out


async def test_the_change_of_code_alone_can_be_had(plain: ScriptedYard) -> None:
    ended = await run("compare", FIRST, SECOND, "--diff")
    assert ended.lines[0] == "--- first"
    assert ended.lines[-2:] == ["-+print(2)", "++print(3)"]


async def test_a_comparison_for_programs_has_runs_rows_and_diffs(plain: ScriptedYard) -> None:
    answer = json.loads((await run("compare", FIRST, SECOND, "-o", "json")).out)
    assert [each["id"] for each in answer["runs"]] == [FIRST, SECOND]
    assert {"part": "params", "name": "lr", "values": [0.1, 0.2]} in answer["rows"]
    assert answer["diffs"][0] == DIFF.format(2)


async def test_equal_runs_differ_in_nothing(plain: ScriptedYard) -> None:
    assert (await run("compare", FIRST, FIRST)).lines == ["nothing differs"]


async def test_equal_code_is_said_to_be_equal(plain: ScriptedYard) -> None:
    ended = await run("compare", FIRST, FIRST, "--diff")
    assert (ended.code, ended.out) == (0, "")
    assert "is the same" in ended.err


async def test_a_script_whose_name_looks_like_an_id_is_found_by_its_name(plain: ScriptedYard) -> None:
    plain.runs = [found(FIRST, name="facade")]
    assert FIRST in (await run("runs", "show", "facade")).out
    assert plain.asked("SearchRuns")[0].filter == 'name = "facade" or id like "facade%"'


async def test_what_neither_a_job_nor_a_run_is_called_is_told_as_that(plain: ScriptedYard) -> None:
    ended = await run("metrics", "nothing")
    assert ended.code == 3
    assert "no job or run 'nothing'" in ended.err
    assert "yard runs list" in ended.err


async def test_a_pattern_of_logs_that_is_none_is_told_in_words(yard: ScriptedYard) -> None:
    ended = await run("logs", "--regex", "(")
    assert ended.code == 2
    assert "not a pattern of RE2: missing ): (" in ended.err


async def test_logs_without_a_line_say_so_beside_an_empty_output(yard: ScriptedYard) -> None:
    yard.stored = []
    for options, said in (((), "it has written nothing"), (("--search", "lr"), "no such lines")):
        ended = await run("logs", "@last", *options)
        assert (ended.code, ended.out, ended.err.strip()) == (0, "", said)
    assert (await run("logs", "@last", "-o", "json")).err == ""


async def test_one_run_cannot_be_compared(yard: ScriptedYard) -> None:
    ended = await run("compare", "digits")
    assert (ended.code, "two or more" in ended.err) == (2, True)


async def test_metrics_of_a_plain_script_are_shown_as_a_jobs(plain: ScriptedYard) -> None:
    plain.series = [metrics_pb2.SeriesInfo(name="loss", count=2, last_value=0.5)]
    ended = await run("metrics", FIRST)
    assert "loss" in ended.out
    assert plain.asked("ListSeries")[0].selector.run_id == FIRST


async def test_hidden_points_are_asked_for(yard: ScriptedYard) -> None:
    yard.series = [metrics_pb2.SeriesInfo(name="loss", count=2, last_value=0.5)]
    await run("metrics", "@last", "loss", "--hidden", "-o", "json")
    assert yard.asked("QuerySeries")[0].selector.include_hidden


async def test_the_output_of_a_plain_script_is_nowhere_but_in_its_terminal(plain: ScriptedYard) -> None:
    ended = await run("logs", FIRST)
    assert ended.code == 6
    assert "plain script" in ended.err
    assert f"yard metrics {FIRST}" in ended.err


async def test_logs_of_an_attempts_run_are_the_jobs_of_that_attempt(yard: ScriptedYard) -> None:
    yard.refusals["GetJob"] = [Refusal(grpc.StatusCode.NOT_FOUND, "no such job", "JobNotFound")] * 2
    yard.runs = [found(FIRST, job_id=JOB_ID, fence=2)]
    yard.stored = [
        metrics_pb2.StoredLine(attempt=1, line=line(0, "before")),
        metrics_pb2.StoredLine(attempt=2, line=line(0, "again")),
    ]
    assert (await run("logs", FIRST)).lines == ["again"]


async def test_a_pattern_holds_for_stored_and_for_live_lines(yard: ScriptedYard) -> None:
    yard.job = job("succeeded")
    yard.stored = [metrics_pb2.StoredLine(attempt=1, line=line(0, "epoch 1"))]
    yard.live = [[started(1), lines(line(0, "epoch 1"), line(1, "saving"), line(2, "epoch 2"))]]
    ended = await run("logs", "-f", "--regex", r"^epoch \d+$")
    assert ended.lines == ["epoch 1", "epoch 2"]
    assert yard.asked("ReadLogs")[0].regex == r"^epoch \d+$"


async def test_a_pattern_that_is_none_is_refused_before_anything_is_asked(yard: ScriptedYard) -> None:
    ended = await run("logs", "--regex", "(")
    assert ended.code == 2
    assert "--regex" in ended.err
    assert yard.calls == []
