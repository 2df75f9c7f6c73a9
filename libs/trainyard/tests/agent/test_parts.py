"""A defect in what the agent does beside the workers is told, and does not end training."""

import asyncio
import textwrap

import pytest
from trainyard.agent import parts
from trainyard.agent.parts import CHECKPOINTS, MEASURING, Parts

TRAIN = """
import os, pathlib, time
from trainyard import tracker
for step in range(3):
    tracker.log({"loss": step}, step=step)
    print("step", step, flush=True)
    pathlib.Path("draft").write_text(str(step))
    os.rename("draft", f"checkpoints/step-{step}.txt")
"""
UNTIL_IT_FAILED = """
while "no such thing" not in open("../agent.log").read():
    time.sleep(0.05)
"""
DEFECT = """
import sys
if "trainyard.agent" in sys.orig_argv:
    import importlib
    def fail(*_, **__): raise KeyError("no such thing")
    setattr(getattr(importlib.import_module("trainyard.agent.{module}"), "{owner}"), "{name}", fail)
"""


@pytest.fixture
def notes():
    return []


@pytest.fixture
def some_parts(notes, monkeypatch):
    monkeypatch.setattr(parts, "FIRST_PAUSE_S", 0)
    return Parts(lambda reason, text: notes.append((reason, text)))


class Part:
    """Fails so many times, and then does its work."""

    def __init__(self, failures):
        self.failures = failures
        self.begun = 0

    async def work(self):
        self.begun += 1
        if self.begun <= self.failures:
            raise KeyError("gone")


async def test_a_part_that_failed_begins_again(some_parts, notes):
    part = Part(failures=2)
    await some_parts.run(CHECKPOINTS, part.work)
    assert part.begun == 3 and some_parts.unstored == []
    assert notes == [("AgentDefect", "checkpoints: KeyError: 'gone'; training goes on")] * 2


async def test_a_part_that_keeps_failing_is_given_up_and_what_it_carried_is_not_stored(some_parts):
    part = Part(failures=99)
    await some_parts.run(CHECKPOINTS, part.work)
    assert part.begun == parts.TRIES
    assert some_parts.unstored == ["checkpoints: KeyError: 'gone'"]


async def test_a_part_that_carries_nothing_leaves_nothing_unstored(some_parts):
    await some_parts.run(MEASURING, Part(failures=99).work)
    assert MEASURING in some_parts.failed and some_parts.unstored == []


async def test_a_part_can_be_cancelled(some_parts):
    waiting = some_parts.run(MEASURING, asyncio.Event().wait)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert some_parts.failed == {}


@pytest.mark.parametrize(
    ("defect", "unstored", "note"),
    [
        ("checkpoints CheckpointSync _send", "checkpoint 'step-2.txt': 'no such thing'", "CheckpointNotStored"),
        ("tracked Tracked cut", "checkpoint 'step-2.txt': 'no such thing'", "CheckpointNotStored"),
        ("candidates Candidates finish", "checkpoints: KeyError: 'no such thing'", "AgentDefect"),
        ("shipper Shipper _talk", "logs and points: KeyError: 'no such thing'", "AgentDefect"),
        ("tracked Tracked look", "reading the trackers: KeyError: 'no such thing'", "AgentDefect"),
        ("output _File read", "reading the output: KeyError: 'no such thing'", "AgentDefect"),
        ("sampler Sampler sample", "", "AgentDefect"),
    ],
)
async def test_workers_of_an_agent_with_a_defect_train_to_their_end(
    attempt, yard, monkeypatch, tmp_path, defect, unstored, note
):
    module, owner, name = defect.split()
    code = textwrap.dedent(DEFECT).format(module=module, owner=owner, name=name)
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = TRAIN + ("" if name == "finish" else UNTIL_IT_FAILED) + 'print("trained to the end")'
    checkpoints = {"path": "checkpoints", "pattern": "step-{step}.txt", "settle_s": 0.1}
    run = attempt(["python-code", worker], checkpoints=checkpoints)
    exit = await run.run()
    assert run.output().endswith("trained to the end\n")
    assert exit.reason == ("OutputsNotStored" if unstored else "Completed")
    assert unstored in "\n".join(exit.unstored) and exit.acknowledged is not bool(unstored)
    assert note in yard.launcher.notes()
