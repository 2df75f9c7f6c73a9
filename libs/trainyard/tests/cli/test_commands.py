import json
from pathlib import Path

import grpc
import pytest
from ruamel.yaml import YAML
from trainyard_protos.v1 import artifacts_pb2, common_pb2, metrics_pb2, scheduler_pb2

from libs.trainyard.tests.cli.commandline import run, run_on_terminal
from libs.trainyard.tests.client.scripted import (
    JOB_ID,
    Refusal,
    ScriptedYard,
    document,
    event,
    job,
    line,
    lines,
    started,
)

S = grpc.StatusCode
SHORT = JOB_ID[:18]


async def test_without_a_yard_every_command_says_how_to_start_one(tmp_path: Path) -> None:
    for arguments in (["jobs"], ["status"], ["logs"], ["cancel", "x"], ["artifacts", "list"]):
        ended = await run(*arguments, TRAINYARD_HOME=str(tmp_path))
        assert ended.code == 4
        assert "no yard is running" in ended.err
        assert "yard up" in ended.err
        assert ended.out == ""


async def test_a_home_below_a_file_has_no_yard(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = await run("down", TRAINYARD_HOME=str(tmp_path / "file" / "home"))
    assert (ended.code, ended.out, ended.err) == (0, f"no yard is running in {tmp_path}/file/home\n", "")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (S.INVALID_ARGUMENT, 2),
        (S.NOT_FOUND, 3),
        (S.UNAVAILABLE, 4),
        (S.PERMISSION_DENIED, 5),
        (S.FAILED_PRECONDITION, 6),
        (S.INTERNAL, 70),
    ],
)
async def test_exit_codes_are_those_documented(yard: ScriptedYard, status: grpc.StatusCode, code: int) -> None:
    yard.refusals["CancelJob"] = [Refusal(status, "what is wrong", "SomeReason", "do this next")]
    ended = await run("cancel", "x")
    assert ended.code == code
    assert ended.err == "error: what is wrong\nnext: do this next\n"


@pytest.mark.parametrize("arguments", [["status"], ["jobs", "--label", "a=b", "--name"]], ids=" ".join)
async def test_an_argument_that_is_not_utf_8_is_refused_with_its_bytes_escaped(
    yard: ScriptedYard, arguments: list[str]
) -> None:
    ended = await run(*arguments, "x\udcff")  # how Python reads the byte 0xff
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "error: the text 'x\\xff' is not valid UTF-8\n"


async def test_problems_of_a_document_are_listed_with_file_line_field_and_spelling(yard: ScriptedYard) -> None:
    problems = [
        common_pb2.Problem(
            file="job.yaml", line=12, field="spec.resources.cpus", message="is unknown", suggestion="cpu"
        ),
        common_pb2.Problem(file="job.yaml", line=14, field="spec.nodes", message="is 0", allowed="1 to 1024"),
    ]
    yard.refusals["Submit"] = [Refusal(S.INVALID_ARGUMENT, "2 problems", "InvalidSpec", problems=problems)]
    ended = await run("submit", "-", stdin="kind: x\n")
    assert ended.code == 2
    assert ended.err.splitlines() == [
        "job.yaml:12: spec.resources.cpus: is unknown; did you mean cpu?",
        "job.yaml:14: spec.nodes: is 0; allowed: 1 to 1024",
        "error: 2 problems in the document; nothing was created",
    ]


async def test_a_problem_on_standard_input_has_its_line(yard: ScriptedYard) -> None:
    problems = [common_pb2.Problem(line=2, field="spec.nodes", message="is 0")]
    yard.refusals["Submit"] = [Refusal(S.INVALID_ARGUMENT, "1 problem", "InvalidSpec", problems=problems)]
    ended = await run("submit", "-", stdin="kind: x\n")
    assert ended.err.splitlines()[0] == "line 2: spec.nodes: is 0"


async def test_an_explanation_names_jobs_as_the_other_commands_do(yard: ScriptedYard) -> None:
    yard.job.CopyFrom(job("queued"))
    ended = await run_on_terminal("explain")
    assert "position  2" in ended.out
    assert f"yard explain {SHORT}" in ended.lines[-1]
    yard.job.CopyFrom(job("failed"))
    assert "position" not in (await run("explain")).out


async def test_a_wrong_option_is_exit_code_2(yard: ScriptedYard) -> None:
    assert (await run("jobs", "-o", "xml")).code == 2
    assert (await run("jobs", "--label", "team")).code == 2
    assert (await run("jbos")).code == 2
    assert yard.calls == []


async def test_a_port_that_is_none_is_exit_code_2_with_the_allowed_range(tmp_path: Path) -> None:
    for option in ("--port", "--metrics-port"):
        ended = await run("up", option, "80000", TRAINYARD_HOME=str(tmp_path / "home"))
        assert ended.code == 2
        assert f"'{option}': 80000 is not a port; allowed: 0 to 65535" in ended.err
    assert not (tmp_path / "home").exists()


async def test_jobs_are_listed_for_people(yard: ScriptedYard) -> None:
    yard.jobs = [
        job(),
        job("queued", pending=scheduler_pb2.Pending(reason="WaitingForCapacity", message="wants 4 CPU, 1 is free")),
    ]
    ended = await run("jobs")
    assert ended.code == 0
    assert ended.lines[0].split() == ["ID", "NAME", "STATE", "AGE", "RAN", "ATTEMPT", "REASON"]
    assert ended.lines[1].startswith(f"{SHORT}  digits  running")
    assert ended.lines[2].endswith("WaitingForCapacity: wants 4 CPU, 1 is free")
    assert len(ended.lines) == 3  # what to do next is for people
    assert "\x1b" not in ended.out
    assert (await run_on_terminal("jobs")).lines[3].startswith("next: yard status")


async def test_wide_shows_more(yard: ScriptedYard) -> None:
    yard.jobs = [job()]
    assert "PRIORITY" in (await run("jobs", "-o", "wide")).lines[0]


async def test_jobs_are_listed_for_programs(yard: ScriptedYard) -> None:
    yard.jobs = [job(resolved='{"kind": "TrainingJob", "spec": {"nodes": 1}}')]
    for form, read in (("json", json.loads), ("yaml", YAML(typ="safe").load)):
        (found,) = read((await run("jobs", "-o", form)).out)
        assert (found["id"], found["state"], found["workersPerNode"]) == (JOB_ID, "running", 1)
        assert found["spec"] == {"nodes": 1}
        assert found["createdNs"] == 1_700_000_000_000_000_000


async def test_filters_reach_the_yard(yard: ScriptedYard) -> None:
    await run("jobs", "--state", "failed", "--queue", "gpu", "--name", "dig", "--label", "a=b", "--all", "--limit", "7")
    (request,) = yard.asked("ListJobs")
    assert list(request.states) == [scheduler_pb2.JOB_STATE_FAILED]
    assert (request.queue, request.name_contains, request.include_owned) == ("gpu", "dig", True)
    assert (dict(request.labels), request.page_size) == ({"a": "b"}, 7)


async def test_a_job_without_a_name_is_the_last_one(yard: ScriptedYard) -> None:
    for command in ("status", "explain", "logs", "metrics", "stacks"):
        assert (await run(command)).code == 0
    assert {request.id for request in yard.asked("GetJob")} == {"@last"}


async def test_status_tells_attempts_and_what_comes_next(yard: ScriptedYard) -> None:
    meaning = "exit code 137 (SIGKILL): killed from outside"
    failure = common_pb2.Exit(reason="WorkerFailed", exit_code=137, first_failing_rank=1, meaning=meaning)
    yard.job = job(
        "failed", reason="RetryLimit", attempts=[scheduler_pb2.Attempt(number=1, state="ended", exit=failure)]
    )
    ended = await run_on_terminal("status", "digits")
    assert "WorkerFailed: rank 1: exit code 137 (SIGKILL): killed from outside" in ended.out
    assert f"yard retry {SHORT}" in ended.lines[-1]


async def test_all_times_of_a_command_are_in_the_users_time_zone_which_is_named(yard: ScriptedYard) -> None:
    yard.events = [[event(1, "Submitted", "queued", time_ns=1_700_000_000_000_000_000)]]
    there = {"TZ": "XYZ-3"}  # three hours ahead of UTC
    assert "created  2023-11-15 01:13:20 XYZ" in " ".join((await run("status", **there)).out.split("\n"))
    assert (await run("events", JOB_ID, **there)).lines[0].startswith("2023-11-15 01:13:20 XYZ")
    yard.stored = [metrics_pb2.StoredLine(attempt=1, line=line(1, "hello"))]
    assert (await run("logs", "--times", **there)).lines == ["03:00:00.000 XYZ hello"]


async def test_events_are_lines_or_objects(yard: ScriptedYard) -> None:
    yard.events = [
        [event(1, "Submitted", "queued"), event(2, "Failed", "failed", reason="Hung", message="no progress")]
    ]
    assert (await run("events", JOB_ID)).lines[1].endswith("Hung: no progress")
    first, second = (json.loads(each) for each in (await run("events", JOB_ID, "-o", "json")).lines)
    assert (first["type"], second["reason"], second["state"]) == ("Submitted", "Hung", "failed")


def changed(seq: int, time_ns: int, name: str, kind: str = "AliasSet") -> scheduler_pb2.Event:
    return scheduler_pb2.Event(
        seq=seq,
        time_ns=time_ns,
        kind="Artifact",
        object_name=name,
        type=kind,
        actor="user/127.0.0.1",
        message="best: version 1 -> version 2",
    )


async def test_events_of_everything_are_merged_by_time(yard: ScriptedYard) -> None:
    yard.events = [[event(1, "Submitted", "queued", time_ns=10), event(2, "Running", "running", time_ns=30)]]
    yard.admin["artifacts.ListAdminEvents"] = [changed(1, 20, "words"), changed(2, 40, "digits-model")]
    yard.admin["metrics.ListAdminEvents"] = [changed(1, 25, "metrics", "Maintained")]
    ended = await run("events")
    kinds = ["Submitted", "AliasSet", "Maintained", "Running", "AliasSet"]
    assert [kind for line, kind in zip(ended.lines, kinds, strict=True) if kind in line] == kinds
    assert ended.lines[1].endswith("words  AliasSet  user/127.0.0.1  best: version 1 -> version 2")


async def test_events_of_an_artifact_are_what_users_changed_of_it(yard: ScriptedYard) -> None:
    yard.admin["artifacts.ListAdminEvents"] = [changed(1, 20, "words"), changed(2, 40, "digits-model")]
    ended = await run("events", "--artifact", "words", "-o", "json")
    assert [json.loads(line)["objectName"] for line in ended.lines] == ["words"]
    for wrong in (("digits", "--artifact", "words"), ("--artifact", "words", "-f")):
        assert (await run("events", *wrong)).code == 2


async def test_an_artifact_that_no_user_changed_has_no_events(yard: ScriptedYard) -> None:
    ended = await run("events", "--artifact", "words")
    assert (ended.code, ended.out) == (0, "")
    assert "no user changed an artifact named 'words'" in ended.err
    assert (await run("events", "--artifact", "words", "-o", "json")).err == ""


async def test_events_tell_when_those_of_a_service_cannot_be_read(yard: ScriptedYard) -> None:
    yard.events = [[event(1, "Submitted", "queued")]]
    yard.refusals["metrics.ListAdminEvents"] = [Refusal(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")]
    ended = await run("events")
    assert (ended.code, len(ended.lines)) == (0, 1)
    assert "events of metrics are left out: Method not found!" in ended.err


async def test_submit_tells_the_id_and_what_comes_next(yard: ScriptedYard, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(document())
    ended = await run_on_terminal("submit", str(file), "--key", "mine")
    assert ended.lines[0] == f"submitted: digits ({JOB_ID})"
    assert f"yard logs -f {SHORT}" in ended.lines[1]
    assert yard.asked("Submit")[0].idempotency_key == "mine"


async def test_a_dry_run_submits_nothing(yard: ScriptedYard) -> None:
    ended = await run("submit", "--dry-run", "-", stdin=document())
    assert ended.lines[:3] == ["kind: TrainingJob", "spec: {nodes: 1}", "---"]
    assert yard.asked("Submit") == []


async def test_a_dry_run_needs_no_yard_to_refuse_a_wrong_file(tmp_path: Path) -> None:
    ended = await run(
        "submit", "--dry-run", "-", stdin=document().replace("command", "comand"), TRAINYARD_HOME=str(tmp_path)
    )
    assert ended.code == 2
    assert "did you mean command?" in ended.err


async def test_a_dry_run_gives_programs_the_spec_as_an_object(yard: ScriptedYard) -> None:
    for form, read in (("json", json.loads), ("yaml", YAML(typ="safe").load)):
        plan = read((await run("submit", "--dry-run", "-", "-o", form, stdin=document())).out)
        assert plan["spec"] == {"nodes": 1}


async def test_render_needs_no_yard_when_there_is_no_code_to_pack(tmp_path: Path) -> None:
    ended = await run("render", "-", stdin=document(), TRAINYARD_HOME=str(tmp_path))
    assert ended.code == 0
    rendered = YAML(typ="safe").load(ended.out)
    assert rendered["spec"]["workersPerNode"] == 1


async def test_render_packs_code(yard: ScriptedYard, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hi')\n")
    (tmp_path / "job.json").write_text(document(code={"path": "."}))
    ended = await run("render", str(tmp_path / "job.json"))
    assert YAML(typ="safe").load(ended.out)["spec"]["code"]["artifact"] == "digits-code@4"


async def test_render_lists_problems_without_a_yard(tmp_path: Path) -> None:
    ended = await run("render", "-", stdin=document(comand=["x"]), TRAINYARD_HOME=str(tmp_path))
    assert ended.code == 2
    assert "spec.comand" in ended.err
    assert "did you mean command?" in ended.err


async def test_schema_is_json() -> None:
    assert json.loads((await run("schema")).out)["title"].startswith("TrainingJob")


async def test_logs_lead_with_the_rank_when_there_are_several(yard: ScriptedYard) -> None:
    yard.job = job("succeeded", workers_per_node=2)
    yard.stored = [
        metrics_pb2.StoredLine(attempt=1, line=line(0, "hello", rank=0)),
        metrics_pb2.StoredLine(attempt=1, line=line(1, "world", rank=1)),
    ]
    assert (await run("logs")).lines == ["[rank 0] hello", "[rank 1] world"]
    first, _ = (json.loads(each) for each in (await run("logs", "-o", "json")).lines)
    assert (first["attempt"], first["line"]["text"]) == (1, "hello")


async def test_logs_of_a_rank_or_an_attempt_that_does_not_exist_are_not_found(yard: ScriptedYard) -> None:
    yard.job = job("running", workers_per_node=4, attempt=2, number=7)
    for arguments, problem, exist in (
        (["--rank", "1", "--rank", "7"], "digits#7 has no rank 7", "its ranks are 0 to 3; -1 selects"),
        (["--attempt", "9"], "digits#7 has no attempt 9", "its attempts are 1 to 2"),
    ):
        ended = await run("logs", *arguments)
        assert (ended.code, ended.out) == (3, "")
        assert problem in ended.err
        assert exist in ended.err


@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("failed", 1), ("cancelled", 7)])
async def test_following_logs_goes_on_after_what_is_stored_and_exits_as_the_job(
    yard: ScriptedYard, state: str, code: int
) -> None:
    yard.job = job(state)
    yard.stored = [metrics_pb2.StoredLine(attempt=1, line=line(0, "a"))]
    yard.live = [[started(1), lines(line(0, "a"), line(1, "b"), line(2, "c"))]]
    ended = await run("logs", "-f")
    assert ended.lines == ["a", "b", "c"]
    assert ended.code == code


async def test_metrics_are_a_table_a_plot_or_points(yard: ScriptedYard) -> None:
    yard.series = [
        metrics_pb2.SeriesInfo(name="accuracy", count=2, last_step=2, last_value=0.98, min_value=0.5, max_value=0.98),
        metrics_pb2.SeriesInfo(name="system/cpu", count=1, last_value=1.0),
    ]
    table = await run("metrics")
    assert table.lines[1].split() == ["accuracy", "0", "2", "2", "0.98", "0.5", "0.98"]
    assert "system/cpu" not in table.out
    assert "system/cpu" in (await run("metrics", "@last", "-o", "wide")).out
    assert "accuracy (rank 0, 2 points)" in (await run("metrics", "@last", "accuracy")).out
    points = json.loads((await run("metrics", "@last", "accuracy", "-o", "json")).out)
    assert points[0]["value"] == [1.0, 0.98]


async def test_artifacts_are_listed_with_how_to_get_them(yard: ScriptedYard) -> None:
    facts = artifacts_pb2.CheckpointInfo(step=7, best_metric="val/loss", best_mode="min", metrics={"val/loss": 0.25})
    best = artifacts_pb2.Version(
        name="m", number=3, kind="checkpoint", size=2048, files=1, checkpoint=facts, aliases=["best", "latest"]
    )
    yard.versions = [best]
    yard.details["m@best"] = artifacts_pb2.VersionDetail(version=best)
    ended = await run_on_terminal("artifacts", "list")
    assert ended.lines[0].split() == ["VERSION", "KIND", "STEP", "METRIC", "SIZE", "FILES", "AGE", "ALIASES"]
    assert ended.lines[1].split()[:7] == ["m@3", "checkpoint", "7", "val/loss", "0.25", "2.0", "KiB"]
    assert ended.lines[1].endswith("best, latest")
    assert ended.lines[-1] == "next: yard artifacts show m@3  ·  yard artifacts get m@3"
    assert "compared by  val/loss 0.25 (min is best)" in (await run("artifacts", "show", "m@best")).lines


async def test_a_shell_carries_input_output_and_exit_code(yard: ScriptedYard) -> None:
    ended = await run("shell", "digits", "--", "cat", "-n", stdin="some words\n")
    assert ended.out == "opened cat -n tty=False\nSOME WORDS\n"
    assert ended.code == 9


async def test_stacks_show_every_rank(yard: ScriptedYard) -> None:
    assert (await run("stacks")).lines == ["rank 0 (process 7)", "main (train.py:3)"]


async def test_version_tells_both_sides(yard: ScriptedYard) -> None:
    answer = json.loads((await run("version", "-o", "json")).out)
    assert answer["yard"]["version"] == "0.1.0"
    assert answer["client"]


async def test_version_works_without_a_yard(tmp_path: Path) -> None:
    assert "not running" in (await run("version", TRAINYARD_HOME=str(tmp_path))).out


async def test_down_without_a_yard_is_done(tmp_path: Path) -> None:
    ended = await run("down", TRAINYARD_HOME=str(tmp_path))
    assert (ended.code, ended.out) == (0, f"no yard is running in {tmp_path}\n")


async def test_up_says_when_a_yard_is_up_already(yard: ScriptedYard) -> None:
    ended = await run("up")
    assert ended.code == 0
    assert f"a yard is up at 127.0.0.1:{yard.port}" in ended.out


async def test_up_does_not_take_over_a_yard_that_ends_with_its_jobs(yard: ScriptedYard) -> None:
    yard.publish(ephemeral=True)
    assert (await run("up")).code == 6


async def test_ids_are_completed(yard: ScriptedYard) -> None:
    yard.jobs = [job()]
    words = {"_YARD_COMPLETE": "complete_bash", "COMP_WORDS": "yard status dig", "COMP_CWORD": "2"}
    assert (await run(**words)).out.split() == ["digits"]
    words["COMP_WORDS"] = f"yard status {JOB_ID[:4]}"
    assert (await run(**words)).out.split() == [JOB_ID]


async def test_completion_is_silent_without_a_yard(tmp_path: Path) -> None:
    words = {"_YARD_COMPLETE": "complete_bash", "COMP_WORDS": "yard status dig", "COMP_CWORD": "2"}
    ended = await run(**words, TRAINYARD_HOME=str(tmp_path))
    assert (ended.out.strip(), ended.err) == ("", "")


async def test_a_reader_that_leaves_early_is_no_error(yard: ScriptedYard) -> None:
    import asyncio
    import sys

    yard.stored = [metrics_pb2.StoredLine(attempt=1, line=line(seq, "x" * 1000)) for seq in range(2000)]
    shell = f"{sys.executable} -m trainyard.cli.main logs | head -1; exit ${{PIPESTATUS[0]}}"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", shell, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert out.decode() == "x" * 1000 + "\n"
    assert (err.decode(), process.returncode) == ("", 0)
