"""The launcher with the agent it ships with."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from launcher_yard import Yard, running_yard, secret
from trainyard_launcher.backends.process import sweep
from trainyard_launcher.backends.process.agents import AGENT
from trainyard_protos.v1 import launcher_pb2

from scripts.testbed.patience import PATIENCE_S

FOREVER = [sys.executable, "-c", "import signal; print('here', flush=True); signal.pause()"]


@pytest.fixture
async def yard(tmp_path: Path):
    async with running_yard(tmp_path, agent=AGENT, records=True) as yard:
        yield yard


async def test_output_reaches_a_follower_while_the_worker_runs(yard: Yard) -> None:
    attempt = await yard.run(FOREVER)
    call = yard.user.Follow(launcher_pb2.FollowRequest(job_id=yard.job_of(attempt), attempt=1))
    async with asyncio.timeout(PATIENCE_S):
        async for event in call:
            if any(line.text == "here" and line.rank == 0 for line in event.lines.lines):
                break
    call.cancel()


async def test_a_stop_ends_the_workers_and_the_agent(yard: Yard) -> None:
    attempt = await yard.run(FOREVER, workers_per_node=2, grace_period="2s")
    yard.send_stop(attempt)
    assert (await yard.scheduler.ended(attempt)).exit.reason == "Stopped"
    assert not sweep.find(sweep.Target(attempt))


async def test_a_failing_worker_is_named_by_the_agent(yard: Yard) -> None:
    code = "import os, sys; sys.exit(5 if os.environ['TRAINYARD_RANK'] == '1' else 0)"
    attempt = yard.assign([sys.executable, "-c", code], workers_per_node=2)
    yard.send_launch(attempt)
    exit = (await yard.scheduler.ended(attempt)).exit
    assert (exit.reason, exit.exit_code, exit.first_failing_rank) == ("WorkerFailed", 5, 1)


async def test_a_killed_agent_takes_its_workers_along(yard: Yard) -> None:
    attempt = await yard.run(FOREVER, workers_per_node=2)
    os.kill(json.loads((yard.node(attempt) / "started").read_text())["pid"], signal.SIGKILL)
    assert (await yard.scheduler.ended(attempt)).exit.reason == "AgentLost"
    assert not sweep.find(sweep.Target(attempt))


async def test_workers_see_of_the_yards_environment_what_programs_need_and_what_is_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "NVIDIA_API_KEY", "MY_SETTING", "MY_TOKEN", "CUDA_HOME", "OF_THE_SHELL"):
        monkeypatch.setenv(name, "of the yard")
    code = "import json, os; json.dump(dict(os.environ), open(os.environ['SAVED'], 'w'))"
    async with running_yard(tmp_path / "home", agent=AGENT, records=True, inherit_environment="MY_*, NOT_SET") as yard:
        given = {"env": {"SAVED": str(tmp_path / "saved")}, "secrets": (secret("WANDB", "WANDB_API_KEY"),)}
        attempt = yard.assign([sys.executable, "-c", code], **given)
        yard.send_launch(attempt)
        assert (await yard.scheduler.ended(attempt)).exit.reason == "Completed"
    saved = json.loads((tmp_path / "saved").read_text())
    found = {name for name, value in saved.items() if value == "of the yard"}
    assert found == {"MY_SETTING", "MY_TOKEN", "CUDA_HOME", "WANDB"}
