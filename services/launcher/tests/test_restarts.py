"""A launcher that dies at any moment and comes back loses nothing, and starts nothing twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from launcher_yard import SMALL_AGENT, Scheduler, Yard, running_yard
from prometheus_client import CollectorRegistry
from servicekit import server as servers
from servicekit.auth import AttemptTokens, Authenticator, bearer_token
from servicekit.ids import new_id
from trainyard.home import is_alive
from trainyard_launcher.backends.process import sweep
from trainyard_launcher.settings import Settings
from trainyard_protos.v1 import scheduler_pb2_grpc

from scripts.testbed.patience import PATIENCE_S

FOREVER = [sys.executable, "-c", "import signal; signal.pause()"]


class KillableLauncher:
    """A launcher in a process of its own, and the scheduler it talks to in this one."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.yard = Yard(home, Settings(pool=new_id()), SMALL_AGENT)  # for its helpers; its own launcher is not opened
        self.scheduler: Scheduler = self.yard.scheduler
        self._process: subprocess.Popen[bytes] | None = None
        self._server: grpc.aio.Server | None = None

    async def open(self) -> None:
        tokens = AttemptTokens.load_or_create(self.home)
        self._server = servers.build(Authenticator(bearer_token(self.home), tokens), CollectorRegistry())
        self.port = servers.listen(self._server, "127.0.0.1", 0)
        scheduler_pb2_grpc.add_AttemptServiceServicer_to_server(self.scheduler, self._server)
        await self._server.start()

    def begin(self) -> None:
        script = Path(__file__).with_name("launcher_process.py")
        command = [sys.executable, str(script), str(self.home), f"127.0.0.1:{self.port}", self.yard.settings.pool]
        self._process = subprocess.Popen(command)

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def close(self) -> None:
        await self.kill()
        for attempt in self.scheduler.claims:
            await asyncio.to_thread(sweep.end_all, sweep.Target(attempt), PATIENCE_S)
        assert self._server is not None
        await self._server.stop(None)

    def assign(self, command: list[str], **fields: object) -> str:
        """An attempt that reconciling hands to the launcher: claimed, and never begun."""
        attempt = self.yard.assign(command, **fields)
        self.scheduler.claims.append(attempt)
        return attempt

    async def until_started(self, attempt: str, times: int = 1) -> None:
        await self.scheduler.until(lambda: self.scheduler.phases(attempt).count("started") >= times)

    def identity(self, attempt: str, node: int = 0) -> tuple[int, int, str]:
        fields = json.loads((self.yard.node(attempt, node) / "started").read_text())
        return fields["pid"], fields["start_time"], fields["boot_id"]


@pytest.fixture
async def killable(tmp_path: Path) -> AsyncIterator[KillableLauncher]:
    launcher = KillableLauncher(tmp_path)
    await launcher.open()
    launcher.begin()
    yield launcher
    await launcher.close()


async def test_a_killed_launcher_finds_its_attempts_again(killable: KillableLauncher, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    attempt = killable.assign([sys.executable, "-c", f"open({str(go)!r}).read()"])
    await killable.until_started(attempt)
    before = killable.identity(attempt)
    await killable.kill()
    assert is_alive(*before)
    killable.begin()
    await killable.until_started(attempt, times=2)
    assert killable.identity(attempt) == before
    await asyncio.to_thread(go.write_text, "go")
    assert (await killable.scheduler.ended(attempt)).exit.reason == "Completed"


async def test_an_end_nobody_saw_is_read_from_its_record(killable: KillableLauncher, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    attempt = killable.assign([sys.executable, "-c", f"import sys; open({str(go)!r}).read(); sys.exit(9)"])
    await killable.until_started(attempt)
    agent, *_ = killable.identity(attempt)
    await killable.kill()
    pidfd = os.pidfd_open(agent)
    await asyncio.to_thread(go.write_text, "go")
    await asyncio.to_thread(_wait_for, pidfd)
    killable.begin()
    exit = (await killable.scheduler.ended(attempt)).exit
    assert (exit.reason, exit.exit_code) == ("WorkerFailed", 9)


async def test_agents_that_died_meanwhile_are_lost_and_their_workers_gone(killable: KillableLauncher) -> None:
    attempt = killable.assign(FOREVER, nodes=2)
    await killable.until_started(attempt)
    await killable.kill()
    os.kill(killable.identity(attempt, 1)[0], signal.SIGKILL)
    killable.begin()
    exit = (await killable.scheduler.ended(attempt)).exit
    assert (exit.reason, exit.node) == ("AgentLost", 1)
    assert not sweep.find(sweep.Target(attempt))


async def test_an_attempt_that_is_not_ours_any_more_is_ended_at_the_restart(killable: KillableLauncher) -> None:
    attempt = killable.assign(FOREVER)
    await killable.until_started(attempt)
    await killable.kill()
    del killable.scheduler.assignments[attempt]
    killable.begin()
    await killable.scheduler.ended(attempt)
    assert not sweep.find(sweep.Target(attempt))


async def test_a_claim_whose_start_never_happened_is_started_after_the_restart(tmp_path: Path) -> None:
    async with running_yard(tmp_path, reconcile_s=0.2) as yard:
        attempt = yard.assign([sys.executable, "-c", "pass"])
        yard.scheduler.claims.append(attempt)
        assert (await yard.scheduler.ended(attempt)).exit.reason == "Completed"


@pytest.mark.parametrize("state", ["running", "finalizing"])
async def test_an_attempt_that_ran_and_of_which_nothing_is_left_is_not_run_again(tmp_path: Path, state: str) -> None:
    async with running_yard(tmp_path, reconcile_s=0.2) as yard:
        yard.scheduler.assigned_state = state
        attempt = yard.assign([sys.executable, "-c", "pass"])
        facts = ("default", yard.job_of(attempt), attempt, 1)
        yard.scheduler.claims.append(attempt)
        assert (await yard.scheduler.ended(attempt)).exit.reason == "AgentLost"
        assert not yard.node(attempt).exists()
        await yard.scheduler.until(lambda: yard.scheduler.closings == {("metrics", *facts), ("artifacts", *facts)})


async def test_an_agent_that_lost_the_race_for_a_node_changes_nothing(tmp_path: Path) -> None:
    async with running_yard(tmp_path) as yard:
        attempt = await yard.run(FOREVER)
        second = await asyncio.create_subprocess_exec(*SMALL_AGENT, str(yard.node(attempt)))
        assert await second.wait() == 0
        yard.send_stop(attempt)
        assert (await yard.scheduler.ended(attempt)).exit.reason == "Stopped"


async def test_a_launcher_that_is_stopped_lets_its_attempts_run(tmp_path: Path) -> None:
    async with running_yard(tmp_path) as yard:
        attempt = await yard.run(FOREVER)
        before = json.loads((yard.node(attempt) / "started").read_text())
        await yard.restart()
        assert is_alive(**before)
        await yard.scheduler.until(lambda: yard.scheduler.phases(attempt).count("started") == 2)
        yard.send_stop(attempt)
        assert (await yard.scheduler.ended(attempt)).exit.reason == "Stopped"


def _wait_for(pidfd: int) -> None:
    import select

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(PATIENCE_S * 1000)
    os.close(pidfd)
