"""What users see of running attempts: output, state, stacks, shells; and what they may not do."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from launcher_yard import WAIT_S, Yard, running_yard
from servicekit.errors import reason_of
from servicekit.grants import Grants
from trainyard import spec
from trainyard.channel import connect
from trainyard_launcher.backends.process import sweep
from trainyard_protos.v1 import common_pb2, launcher_pb2, launcher_pb2_grpc, scheduler_pb2

FOREVER = [sys.executable, "-c", "import signal; signal.pause()"]
Follow = launcher_pb2.FollowRequest
Input = launcher_pb2.ShellInput


@pytest.fixture
async def yard(tmp_path: Path):
    async with running_yard(tmp_path) as yard:
        yield yard


async def collect(events: AsyncIterator[launcher_pb2.FollowEvent]) -> list[launcher_pb2.FollowEvent]:
    async with asyncio.timeout(WAIT_S):
        return [event async for event in events]


def texts(events: list[launcher_pb2.FollowEvent]) -> list[str]:
    return [line.text for event in events for line in event.lines.lines]


async def test_a_follower_sees_an_attempt_from_its_first_line_to_its_end(yard: Yard) -> None:
    attempt = await yard.run(FOREVER, env={"AGENT_LINES": "3"})
    following = asyncio.create_task(collect(yard.user.Follow(Follow(job_id=yard.job_of(attempt), attempt=1))))
    yard.send_stop(attempt)
    events = await following
    assert texts(events) == ["line 0", "line 1", "line 2"]
    assert events[0].started.attempt_id == attempt
    assert events[-1].ended.exit.reason == "Stopped"


async def test_a_follower_of_another_workspace_sees_nothing(yard: Yard) -> None:
    attempt = await yard.run(FOREVER, env={"AGENT_LINES": "3"})
    job = yard.job_of(attempt)
    assert await collect(yard.user.Follow(Follow(workspace="other", job_id=job))) == []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(yard.user.Follow(Follow(workspace="other", job_id=job, attempt=1)))
    assert reason_of(caught.value) == "JobNotFound"


async def test_a_follower_that_comes_after_the_end_still_gets_the_output(yard: Yard) -> None:
    attempt = await yard.run(FOREVER, env={"AGENT_LINES": "3"})
    job = yard.job_of(attempt)
    yard.send_stop(attempt)
    await yard.scheduler.ended(attempt)
    assert texts(await collect(yard.user.Follow(Follow(job_id=job, attempt=1)))) == ["line 0", "line 1", "line 2"]


async def test_a_follower_that_knows_the_beginning_gets_the_rest(yard: Yard) -> None:
    attempt = await yard.run(FOREVER, env={"AGENT_LINES": "5"})
    wanted = Follow(job_id=yard.job_of(attempt), attempt=1, next_seq={0: 3})
    yard.send_stop(attempt)
    assert texts(await collect(yard.user.Follow(wanted))) == ["line 3", "line 4"]


async def test_lines_that_left_memory_are_told_as_dropped(tmp_path: Path) -> None:
    async with running_yard(tmp_path, ring_lines=2) as yard:
        attempt = await yard.run(FOREVER, env={"AGENT_LINES": "10"})
        job = yard.job_of(attempt)
        yard.send_stop(attempt)
        await yard.scheduler.ended(attempt)
        events = await collect(yard.user.Follow(Follow(job_id=job, attempt=1)))
        dropped = next(event.dropped for event in events if event.WhichOneof("event") == "dropped")
        assert (dropped.from_seq, dropped.to_seq) == (0, 8)
        assert texts(events) == ["line 8", "line 9"]


async def test_following_goes_on_over_a_retry_until_the_job_has_ended(yard: Yard) -> None:
    first = await yard.run(FOREVER, env={"AGENT_LINES": "1"})
    job = yard.job_of(first)
    following = asyncio.create_task(collect(yard.user.Follow(Follow(job_id=job))))
    yard.send_stop(first)
    await yard.scheduler.ended(first)
    second = yard.assign(FOREVER, job_id=job, fence=2, env={"AGENT_LINES": "1"})
    yard.send_launch(second, fence=2)
    await yard.scheduler.until(lambda: "started" in yard.scheduler.phases(second))
    yard.send_stop(second, fence=2)
    await yard.scheduler.ended(second)
    yard.scheduler.job_state = scheduler_pb2.JOB_STATE_SUCCEEDED
    await yard.scheduler.tell()
    events = await following
    assert [event.started.number for event in events if event.WhichOneof("event") == "started"] == [1, 2]
    assert texts(events) == ["line 0", "line 0"]


async def test_following_a_job_that_has_ended_ends_at_once(yard: Yard) -> None:
    yard.scheduler.job_state = scheduler_pb2.JOB_STATE_SUCCEEDED
    assert await collect(yard.user.Follow(Follow(job_id="0199"))) == []


async def test_describe_names_machine_folder_and_workers(yard: Yard) -> None:
    attempt = await yard.run(FOREVER, workers_per_node=2)
    node = (await yard.user.Describe(launcher_pb2.DescribeRequest(job_id=yard.job_of(attempt)))).nodes[0]
    assert (node.machine, node.folder, node.phase) == (yard.settings.machine, str(yard.node(attempt)), "running")


async def test_stacks_are_gathered_from_every_rank(yard: Yard) -> None:
    attempt = await yard.run(FOREVER, nodes=2, workers_per_node=2)
    ranks = (await yard.user.Stacks(launcher_pb2.StacksRequest(job_id=yard.job_of(attempt)))).ranks
    assert [(each.rank, each.text) for each in ranks] == [(rank, "main") for rank in range(4)]


async def test_stacks_of_a_silent_agent_carry_an_error_for_its_ranks(tmp_path: Path) -> None:
    async with running_yard(tmp_path, stacks_timeout_s=0.2) as yard:
        attempt = await yard.run(FOREVER, env={"AGENT_MODE": "stackless"}, workers_per_node=2)
        ranks = (await yard.user.Stacks(launcher_pb2.StacksRequest(job_id=yard.job_of(attempt)))).ranks
        assert [each.rank for each in ranks] == [0, 1]
        assert all("did not answer" in each.error for each in ranks)


async def test_a_job_without_a_running_attempt_is_refused_with_a_hint(yard: Yard) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await yard.user.Describe(launcher_pb2.DescribeRequest(job_id="0199"))
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.FAILED_PRECONDITION, "NotRunning")


async def shell(yard: Yard, attempt: str, *command: str, tty: bool, stdin: bytes = b"", rank: int = 0):
    async def inputs() -> AsyncIterator[Input]:
        yield Input(
            open=Input.Open(job_id=yard.job_of(attempt), rank=rank, command=command, tty=tty, rows=7, columns=77)
        )
        if stdin:
            yield Input(stdin=stdin)
        yield Input(close_stdin=True)
        await asyncio.Event().wait()

    output, code = b"", None
    async with asyncio.timeout(WAIT_S):
        async for message in yard.user.Shell(inputs()):
            output += message.data
            if message.WhichOneof("output") == "exit_code":
                code = message.exit_code
    return output.decode(), code


async def test_a_shell_has_the_workers_folder_and_environment(yard: Yard) -> None:
    attempt = await yard.run(FOREVER, workers_per_node=2, env={"COLOUR": "green"})
    output, code = await shell(yard, attempt, "sh", "-c", "pwd; echo $COLOUR $RANK; exit 3", tty=False, rank=1)
    assert output.split() == [str(yard.node(attempt) / "work"), "green", "1"]
    assert code == 3
    await yard.scheduler.until(lambda: bool(yard.scheduler.notes("ShellOpened")))
    [note] = yard.scheduler.notes("ShellOpened")
    assert note.note == "user/127.0.0.1 opens a shell beside rank 1"


async def test_a_shell_waits_for_the_first_word_about_its_worker(yard: Yard) -> None:
    attempt = await yard.run(FOREVER, workers_per_node=2, env={"AGENT_MODE": "tardy"})
    output, _ = await shell(yard, attempt, "sh", "-c", "echo $RANK", tty=False, rank=1)
    assert output == "1\n"


async def test_a_shell_reads_what_the_user_types(yard: Yard) -> None:
    attempt = await yard.run(FOREVER)
    output, code = await shell(yard, attempt, "sh", tty=False, stdin=b"echo typed-$((40 + 2))\nexit 4\n")
    assert (output, code) == ("typed-42\n", 4)


async def test_a_shell_on_a_terminal_has_its_size_and_controls_it(yard: Yard) -> None:
    attempt = await yard.run(FOREVER)
    output, code = await shell(yard, attempt, "sh", "-c", "stty size; tty; : < /dev/tty && echo controlled", tty=True)
    assert output.split()[:2] == ["7", "77"]
    assert output.split()[2].startswith("/dev/pts/")
    assert output.split()[3] == "controlled"
    assert code == 0


async def test_a_command_that_does_not_exist_is_refused_by_name(yard: Yard) -> None:
    attempt = await yard.run(FOREVER)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await shell(yard, attempt, "no-such-command", tty=True)
    assert reason_of(caught.value) == "ShellFailed"
    assert "no-such-command" in (caught.value.details() or "")


async def test_a_shell_takes_everything_along_when_its_user_hangs_up(yard: Yard, tmp_path: Path) -> None:
    attempt = await yard.run(FOREVER)
    before = sweep.find(sweep.Target(attempt)).keys()

    async def inputs() -> AsyncIterator[Input]:
        script = "trap '' HUP TERM; sleep 1000 & echo ready; wait"
        yield Input(open=Input.Open(job_id=yard.job_of(attempt), command=("sh", "-c", script), tty=True))
        await asyncio.Event().wait()

    call = yard.user.Shell(inputs())
    assert b"ready" in (await anext(aiter(call))).data
    members = sweep.find(sweep.Target(attempt)).keys() - before
    assert len(members) >= 2
    call.cancel()
    await asyncio.to_thread(_all_gone, members)


async def test_an_attempts_token_may_not_ask_what_users_may(yard: Yard) -> None:
    attempt = await yard.run(FOREVER)
    token, _ = yard.tokens.mint("default", yard.job_of(attempt), attempt, 1, 60)
    async with connect(f"127.0.0.1:{yard.port}", token) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            request = launcher_pb2.DescribeRequest(job_id=yard.job_of(attempt))
            await launcher_pb2_grpc.LauncherServiceStub(channel).Describe(request)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def session(yard: Yard, token: str, hello: launcher_pb2.AgentMessage.Hello) -> launcher_pb2.AgentCommand:
    async with connect(f"127.0.0.1:{yard.port}", token) as channel:
        call = launcher_pb2_grpc.AgentServiceStub(channel).Session()
        await call.write(launcher_pb2.AgentMessage(hello=hello))
        async for command in call:
            return command
        raise AssertionError("ended without a word")


async def test_a_user_may_not_open_an_agents_session(yard: Yard) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await session(yard, yard.token, launcher_pb2.AgentMessage.Hello(attempt_id="a", fence=1))
    assert reason_of(caught.value) == "AttemptOnly"


async def test_streams_that_end_before_their_first_word_are_refused_with_what_was_expected(yard: Yard) -> None:
    async def nothing() -> AsyncIterator[Any]:
        for never in ():
            yield never

    token, _ = yard.tokens.mint("default", "job", "a", 1, 60)
    async with connect(f"127.0.0.1:{yard.port}", token) as channel:
        calls = [launcher_pb2_grpc.AgentServiceStub(channel).Session(nothing()), yard.user.Shell(nothing())]
        for call, reason in zip(calls, ("HelloExpected", "OpenExpected"), strict=True):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(call))
            assert reason_of(caught.value) == reason


async def test_a_token_of_another_fence_opens_no_session(yard: Yard) -> None:
    attempt = await yard.run(FOREVER)
    token, _ = yard.tokens.mint("default", yard.job_of(attempt), attempt, 0, 60)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await session(yard, token, launcher_pb2.AgentMessage.Hello(attempt_id=attempt, fence=1))
    assert reason_of(caught.value) == "WrongAttempt"


async def test_an_agent_of_an_attempt_that_is_over_is_told_to_stop(yard: Yard) -> None:
    token, _ = yard.tokens.mint("default", "job", "gone", 1, 60)
    command = await session(yard, token, launcher_pb2.AgentMessage.Hello(attempt_id="gone", fence=1))
    assert command.stop.reason == "Stale"


async def test_an_attempts_token_names_the_artifacts_that_its_job_declares(yard: Yard) -> None:
    declared = {
        "inputs": (spec.Input(artifact="words@3", path="data"),),
        "code": spec.Code(artifact="script"),
        "outputs": (spec.Output(path="out", artifact="model"),),
    }
    wanted = Grants.of(write=["model"], read=["words", "script"])
    attempt = yard.assign(FOREVER, env={"AGENT_MODE": "mute"}, **declared)
    yard.send_launch(attempt)
    plan = yard.node(attempt) / "plan.json"
    async with asyncio.timeout(WAIT_S):
        while not plan.exists():
            await asyncio.sleep(0.01)
        assert yard.tokens.verify(json.loads(plan.read_text())["token"]).grants == wanted
        # An attempt that began under a launcher which named none gets a token that does, at its agent's first word.
        old, _ = yard.tokens.mint("default", yard.job_of(attempt), attempt, 1, 60)
        async with connect(f"127.0.0.1:{yard.port}", old) as channel:
            call = launcher_pb2_grpc.AgentServiceStub(channel).Session()
            hello = launcher_pb2.AgentMessage.Hello(attempt_id=attempt, fence=1)
            await call.write(launcher_pb2.AgentMessage(hello=hello))
            renewed = ""
            async for command in call:
                renewed = command.token.token
                if renewed and yard.tokens.verify(renewed).grants is not None:
                    break
    assert yard.tokens.verify(renewed).grants == wanted
    yard.send_stop(attempt)
    await asyncio.to_thread(sweep.end_all, sweep.Target(attempt), WAIT_S)
    await yard.scheduler.ended(attempt)


async def test_an_agent_that_is_back_before_the_launcher_has_looked_is_welcome(yard: Yard) -> None:
    attempt = await yard.run(FOREVER)
    token, _ = yard.tokens.mint("default", yard.job_of(attempt), attempt, 1, 60)
    hello = launcher_pb2.AgentMessage(hello=launcher_pb2.AgentMessage.Hello(attempt_id=attempt, fence=1))
    await yard.close()
    channel = connect(f"127.0.0.1:{yard.port}", token)
    call = launcher_pb2_grpc.AgentServiceStub(channel).Session()

    async def come_back() -> None:
        await call.write(hello)
        with pytest.raises(grpc.aio.AioRpcError):  # an answer on the same connection: hello is there
            await launcher_pb2_grpc.LauncherServiceStub(channel).Describe(launcher_pb2.DescribeRequest())

    await yard.open(early=come_back)
    assert (await call.read()).WhichOneof("command") == "welcome"
    await channel.close()


async def test_a_node_that_failed_is_not_stopped_with_its_peers(yard: Yard) -> None:
    attempt = yard.assign(FOREVER, nodes=2, env={"AGENT_MODE": "mute"})
    yard.send_launch(attempt)
    await yard.scheduler.until(lambda: attempt in yard.scheduler.claims)
    token, _ = yard.tokens.mint("default", yard.job_of(attempt), attempt, 1, 60)
    Message = launcher_pb2.AgentMessage

    async with connect(f"127.0.0.1:{yard.port}", token) as channel:

        async def connected(node: int, phase: str) -> Any:
            call = launcher_pb2_grpc.AgentServiceStub(channel).Session()
            await call.write(Message(hello=Message.Hello(attempt_id=attempt, fence=1, node=node, phase=phase)))
            return call

        async def stopped(call: Any) -> str:
            while not (command := await call.read()).HasField("stop"):
                pass
            return str(command.stop.reason)

        async with asyncio.timeout(WAIT_S):
            failing, peer = await connected(0, "running"), await connected(1, "running")
            await peer.read()
            exit = common_pb2.Exit(reason="WorkerFailed", exit_code=1)
            await failing.write(Message(phase=Message.Phase(phase="finishing", exit=exit)))
            assert await stopped(peer) == "PeerFailed"
            again = await connected(0, "finishing")
            assert (await again.read()).HasField("welcome")
            yard.send_stop(attempt)
            assert await stopped(again) == "Cancelled"
        for call in (failing, peer, again):
            call.cancel()
    await asyncio.to_thread(sweep.end_all, sweep.Target(attempt), WAIT_S)
    await yard.scheduler.ended(attempt)


def _all_gone(pids: set[int]) -> None:
    sweep.end(lambda: _alive(pids), WAIT_S, "a shell that was hung up")


def _alive(pids: set[int]) -> sweep.Members:
    from trainyard.home import process_start_time

    return {pid: started for pid in pids if (started := process_start_time(pid)) is not None}
