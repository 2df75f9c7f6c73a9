import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from trainyard.cli.run import summary
from trainyard_protos.v1 import artifacts_pb2, common_pb2, metrics_pb2, yard_pb2

from libs.trainyard.tests.cli.commandline import finish, run, start
from libs.trainyard.tests.client.scripted import (
    JOB_ID,
    ScriptedYard,
    document,
    event,
    job,
    line,
    lines,
    started,
)
from scripts.testbed.patience import PATIENCE_S

SHORT = JOB_ID[:18]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "job.json"
    path.write_text(document())
    return str(path)


def ends(yard: ScriptedYard, state: str, **changes: Any) -> None:
    """The job runs, writes two lines and ends."""
    yard.job = job(state, workers_per_node=2, **changes)
    yard.events = [[event(1, "Running", "running"), event(2, state.capitalize(), state)]]
    yard.live = [[started(1), lines(line(0, "hello", rank=0), line(1, "world", rank=1))]]


async def test_a_run_shows_output_by_rank_and_ends_with_the_tracked_values(yard: ScriptedYard, file: str) -> None:
    ends(yard, "succeeded")
    yard.series = [
        metrics_pb2.SeriesInfo(name="train/loss", count=2, last_value=0.1, min_value=0.1, max_value=2.0),
        metrics_pb2.SeriesInfo(name="accuracy", count=2, last_value=0.984444, min_value=0.5, max_value=0.99),
        metrics_pb2.SeriesInfo(name="system/cpu", count=2, last_value=1.0),
    ]
    yard.versions = [
        artifacts_pb2.Version(
            name="checkpoints", number=5, kind="checkpoint", checkpoint=artifacts_pb2.CheckpointInfo(step=600)
        ),
        artifacts_pb2.Version(
            name="checkpoints",
            number=3,
            kind="checkpoint",
            aliases=["best"],
            checkpoint=artifacts_pb2.CheckpointInfo(step=400, best_metric="accuracy", metrics={"accuracy": 0.99}),
        ),
        artifacts_pb2.Version(name="digits-model", number=1, kind="output", size=2048),
    ]
    ended = await run("run", file)
    assert ended.code == 0
    assert ended.lines[0] == f"yard: digits submitted ({JOB_ID})"
    assert "[rank 0] hello" in ended.lines
    assert "[rank 1] world" in ended.lines
    assert f"digits succeeded after 12 s, 1 attempt ({SHORT})" in ended.lines
    assert "checkpoints@5 (step 600)" in ended.out
    assert "checkpoints@3 (step 400, accuracy 0.99)" in ended.out
    assert "next:" not in ended.out  # that is for people
    assert "yard artifacts get digits-model@1" in summary.useful_next(yard.job, yard.versions)
    assert ended.lines[-2:] == ["accuracy: 0.984444", "train/loss: 0.1"]
    assert ended.err == ""


async def test_a_series_of_several_ranks_is_summed_up_for_each(yard: ScriptedYard, file: str) -> None:
    ends(yard, "succeeded")
    yard.series = [
        metrics_pb2.SeriesInfo(name="loss", rank=1, count=2, last_value=0.2, min_value=0.2, max_value=2.0),
        metrics_pb2.SeriesInfo(name="loss", rank=0, count=2, last_value=0.1, min_value=0.1, max_value=1.0),
        metrics_pb2.SeriesInfo(name="accuracy", count=1, last_value=0.9),
    ]
    ended = await run("run", file)
    assert ended.lines[-3:] == ["accuracy: 0.9", "loss (rank 0): 0.1", "loss (rank 1): 0.2"]
    assert "  loss (rank 1)  least 0.2, greatest 2" in ended.lines


FAILURE = common_pb2.Exit(
    reason="WorkerFailed",
    meaning="exit code 1: Python raised ValueError: bad",
    exit_code=1,
    first_failing_rank=3,
    node=1,
    local_rank=1,
    matched_rule=2,
    memory=common_pb2.MemoryUse(peak_bytes=2**28, limit_bytes=2**29, enforced=True),
    last_lines=["loading", "\x1b]0;evil\x07boom"],
)
SHOWN = f"""\
  failed   rank 3 (node 1, local rank 1)
  exit     WorkerFailed: exit code 1: Python raised ValueError: bad
  memory   256.0 MiB of 512.0 MiB (with file cache, limit of the node)
  rule     spec.retries.rules[2]
  earlier  2 attempts, each with its own end: yard status {SHORT}
  last lines of rank 3:
    loading
    ]0;evilboom
"""


async def test_a_failed_run_shows_the_rank_the_meaning_the_memory_and_the_last_lines(
    yard: ScriptedYard, file: str
) -> None:
    ends(yard, "failed", reason="RetryLimit", message="3 of 3 retries are used", attempt=3, exit=FAILURE)
    ended = await run("run", file)
    assert ended.code == 1
    assert "RetryLimit: 3 of 3 retries are used" in ended.out
    assert SHOWN in ended.out
    assert f"yard logs {SHORT} --rank 3" in summary.useful_next(yard.job, [])


async def test_explain_shows_the_same_of_a_failed_job(yard: ScriptedYard) -> None:
    yard.job = job("failed", reason="RetryLimit", message="3 of 3 retries are used", attempt=3, exit=FAILURE)
    assert SHOWN in (await run("explain", SHORT)).out
    told = json.loads((await run("explain", SHORT, "-o", "json")).out)["job"]["exit"]
    assert told["firstFailingRank"] == 3
    assert told["memory"]["limitBytes"] == 2**29


async def test_the_logs_of_a_torchrun_of_the_user_are_those_of_its_node(yard: ScriptedYard) -> None:
    failure = common_pb2.Exit(reason="WorkerFailed", first_failing_rank=3, node=1, output_rank=2, last_lines=["boom"])
    yard.job = job("failed", reason="WorkerFailed", exit=failure)
    assert "  last lines of the workers of node 1:\n    boom\n" in (await run("explain", SHORT)).out
    assert f"yard logs {SHORT} --rank 2" in summary.useful_next(yard.job, [])


async def test_memory_without_an_enforced_limit_says_so(yard: ScriptedYard) -> None:
    memory = common_pb2.MemoryUse(peak_bytes=2**28, limit_bytes=2**29, sampled=True)
    yard.job = job("failed", reason="Hung", exit=common_pb2.Exit(reason="Hung", memory=memory))
    out = (await run("explain", SHORT)).out
    assert "256.0 MiB of 512.0 MiB (resident, sampled, requested; no limit is enforced)" in out


async def test_a_failure_is_told_once(yard: ScriptedYard, file: str) -> None:
    failure = common_pb2.Exit(reason="Hung", message="no sign of life for 3 s")
    ends(yard, "failed", reason="Hung", message="Hung: no sign of life for 3 s", exit=failure)
    summary = (await run("run", file)).out.split("digits failed")[1]
    assert summary.count("no sign of life for 3 s") == 1


async def test_a_cancelled_run_is_exit_code_7_and_shows_why(yard: ScriptedYard, file: str) -> None:
    ends(yard, "cancelled", reason="Cancelled", message="wrong data")
    ended = await run("run", file)
    assert ended.code == 7
    assert "  reason  Cancelled: wrong data" in ended.lines
    assert "(Cancelled: wrong data)" in (await run("status", JOB_ID)).out


async def test_a_missing_file_starts_no_yard(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for arguments in (["run", "nowhere.yaml"], ["run", "--", "nowhere.yaml"]):
        ended = await run(*arguments, TRAINYARD_HOME=str(home))
        assert ended.code == 2
        assert "nowhere.yaml" in ended.err
    assert not home.exists()


async def test_the_way_past_the_parser_does_the_same(yard: ScriptedYard, file: str) -> None:
    ends(yard, "succeeded")
    short = await run("run", file)
    ends(yard, "succeeded")
    parsed = await run("run", "--", file)
    assert sorted(short.lines) == sorted(parsed.lines)
    assert short.code == parsed.code


async def test_a_run_in_a_pipe_loads_nothing_it_does_not_need(yard: ScriptedYard, file: str) -> None:
    ends(yard, "succeeded")
    code = (
        "import sys; from trainyard.cli import main; sys.argv = ['yard', 'run', sys.argv[1]]; main._run();"
        "print({'typer', 'rich', 'pydantic', 'ruamel.yaml', 'blake3', 'torch'} & set(sys.modules))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, file, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert out.decode().splitlines()[-1] == "set()"


async def running(yard: ScriptedYard, file: str) -> tuple[asyncio.subprocess.Process, asyncio.Event]:
    """A run whose job goes on until the event is set."""
    end = asyncio.Event()
    yard.job = job("running")
    yard.events = [[event(1, "Running", "running"), end, event(2, "Cancelled", "cancelled")]]
    yard.live = [[started(1), lines(line(0, "hello")), end]]
    process = await start("run", file)
    assert process.stdout is not None
    while (await process.stdout.readline()) != b"hello\n":
        pass
    return process, end


async def test_an_interrupt_detaches_and_says_how_to_come_back(yard: ScriptedYard, file: str) -> None:
    process, end = await running(yard, file)
    process.send_signal(signal.SIGINT)
    ended = await finish(process)
    end.set()
    assert ended.code == 130
    assert f"detached: digits ({SHORT}) goes on" in ended.out
    assert yard.asked("CancelJob") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_an_end_from_outside_leaves_the_job_to_a_lasting_yard(
    yard: ScriptedYard, file: str, number: signal.Signals
) -> None:
    process, end = await running(yard, file)
    process.send_signal(number)
    ended = await finish(process)
    end.set()
    assert ended.code == 130
    assert yard.asked("CancelJob") == []


async def test_an_end_from_outside_cancels_in_a_yard_that_was_started_for_the_job(
    yard: ScriptedYard, file: str
) -> None:
    yard.publish(ephemeral=True)
    process, end = await running(yard, file)
    process.send_signal(signal.SIGTERM)
    yard.job = job("cancelled")
    end.set()
    assert (await finish(process)).code == 7
    assert len(yard.asked("CancelJob")) == 1


async def test_a_run_holds_the_yard_that_was_started_for_it(yard: ScriptedYard, file: str) -> None:
    yard.publish(ephemeral=True)
    process, end = await running(yard, file)
    process.send_signal(signal.SIGINT)
    await finish(process)
    end.set()
    attached, holding, detached, *_ = yard.asked("hold")
    keep, cancel = yard_pb2.AttachRequest.ON_LOSS_KEEP, yard_pb2.AttachRequest.ON_LOSS_CANCEL
    assert (attached.job_id, attached.on_loss) == ("", keep)
    assert (holding.job_id, holding.on_loss) == (JOB_ID, cancel)
    assert (detached.job_id, detached.on_loss) == (JOB_ID, keep)


async def test_the_yard_knows_that_a_run_is_detached_before_its_user_does(yard: ScriptedYard, file: str) -> None:
    yard.publish(ephemeral=True)
    yard.answers_detach = False
    process, end = await running(yard, file)
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(PATIENCE_S):
        while len(yard.asked("hold")) < 3:
            await asyncio.sleep(0)
    process.kill()
    assert "detached" not in (await finish(process)).out
    end.set()


async def test_a_killed_run_lets_go_of_the_yard(yard: ScriptedYard, file: str) -> None:
    yard.publish(ephemeral=True)
    process, end = await running(yard, file)
    process.kill()
    await process.wait()
    end.set()
    async with asyncio.timeout(PATIENCE_S):
        while not yard.asked("left"):
            await asyncio.sleep(0)
    assert yard.asked("hold")[-1].on_loss == yard_pb2.AttachRequest.ON_LOSS_CANCEL
