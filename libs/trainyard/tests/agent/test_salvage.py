"""What an agent that was killed had not delivered arrives all the same, once."""

import asyncio
import json
import os
import platform
import signal
from importlib.metadata import version

import pytest
from trainyard.agent.plan import read_plan
from trainyard.agent.run_record import RUN_FILE
from trainyard.agent.salvage import read_on, salvage
from trainyard_protos.v1 import metrics_pb2

from scripts.testbed.patience import PATIENCE_S

WORKER = """
from trainyard import tracker
tracker.params({"lr": 0.1})
tracker.note("early")
tracker.log({"loss": 0}, step=0)
print("line 0", flush=True)
open("gate").read()
for number in range(1, 3000):
    print(f"{number - 1}%", end="\\r", flush=True)
    print("line", number, flush=True)
    tracker.log({"loss": number}, step=number)
print("last", end="", flush=True)
tracker.tags({"team": "vision"})
tracker.note("late")
open("done", "w").close()
open("never").read()
"""


@pytest.fixture
async def killed(attempt, yard):
    """An attempt whose agent did not get to read the most of what its worker did before it was killed."""
    run = attempt(["python-code", WORKER])
    work = run.folder / "work"
    work.mkdir()
    for name in ("gate", "done", "never"):
        os.mkfifo(work / name)
    await run.start()
    await yard.launcher.wait_for_line("line 0")
    run.process.send_signal(signal.SIGSTOP)
    await asyncio.to_thread((work / "gate").write_text, "")
    await asyncio.to_thread((work / "done").read_text)
    run.process.kill()
    await run.wait()
    return run


async def delivered(run):
    assert await salvage(run.folder, read_plan(str(run.folder)))
    lines = await run.stored_lines()
    assert [line.seq for line in lines] == sorted({line.seq for line in lines})
    return [line.text for line in lines]


async def described(run):
    async with run.yard.metrics_stub() as stub:
        request = metrics_pb2.ListRunsRequest(workspace="default")
        [found] = [each for each in (await stub.ListRuns(request)).runs if each.id == run.id]
    return found


EXPECTED = [*(f"line {number}" for number in range(3000)), "last"]


async def test_output_that_a_killed_agent_had_not_read_is_delivered_once(killed):
    assert await delivered(killed) == EXPECTED


async def test_salvaging_again_adds_nothing(killed):
    assert await delivered(killed) == await delivered(killed)


async def test_a_salvage_that_was_cut_short_is_gone_on_with(killed):
    (await read_on(killed.folder, read_plan(str(killed.folder)))).spool.close()
    assert await delivered(killed) == EXPECTED


async def test_rows_and_facts_that_a_killed_agent_had_not_sent_are_delivered(killed):
    await delivered(killed)
    assert await killed.series("loss") == {step: float(step) for step in range(3000)}
    run = await described(killed)
    assert json.loads(run.params)["lr"] == 0.1
    assert dict(run.tags) == {"team": "vision"}
    assert run.notes == "early\nlate"


@pytest.mark.parametrize("described_by_agent", [True, False])
async def test_a_run_that_its_agent_could_not_open_is_opened_as_what_it_is(attempt, yard, described_by_agent):
    run = attempt(["sh", "-c", "echo begun; echo > done; exec sleep 3600"], spec_json='{"spec": {"nodes": 1}}')
    (run.folder / "work").mkdir()
    os.mkfifo(run.folder / "work" / "done")
    await yard.stop()
    await run.start()
    await asyncio.to_thread((run.folder / "work" / "done").read_text)
    await wait_for(run.folder / RUN_FILE)
    run.process.kill()
    await run.wait()
    if not described_by_agent:
        (run.folder / RUN_FILE).unlink()
    await yard.start()
    assert await delivered(run) == ["begun"]
    stored = await described(run)
    assert stored.HasField("rewind") and stored.name == "test"
    context = json.loads(stored.context)
    assert json.loads(stored.spec) == {"nodes": 1} and context["host"]
    assert context["argv"][:2] == ["sh", "-c"] and context["python"] == platform.python_version()
    assert context["packages"]["grpcio"] == version("grpcio")


async def wait_for(path):
    async with asyncio.timeout(PATIENCE_S):
        while not path.exists():
            await asyncio.sleep(0.01)
