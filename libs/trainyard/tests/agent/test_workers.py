"""An agent runs workers to their end and says why they ended. Real agents, real processes."""

import asyncio
import json
import os
import signal

import psutil
import pytest
from trainyard.agent.verdict import StopOrder, storing_s
from trainyard.home import process_start_time

from scripts.testbed.patience import PATIENCE_S

CONTRACT = """
import json, os
names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR",
         "MASTER_PORT", "OMP_NUM_THREADS", "TRAINYARD_RANK", "TRAINYARD_NODE", "PYTHONUNBUFFERED"]
print(json.dumps({name: os.environ.get(name) for name in names}))
"""


async def test_a_job_that_succeeds_is_completed_and_everything_is_acknowledged(attempt):
    run = attempt(["sh", "-c", "echo hello; echo world >&2"])
    exit = await run.run()
    assert (exit.reason, exit.exit_code, exit.acknowledged) == ("Completed", 0, True)
    assert [line.text for line in await run.stored_lines()] == ["hello", "world"]


async def test_the_launcher_hears_the_phases_in_order_and_the_exit(attempt, yard):
    run = attempt(["sh", "-c", "echo ready; sleep 3600"])
    await run.start()
    await yard.launcher.wait_for(lambda each: each.phase.phase == "running")
    yard.launcher.tell(stop("Cancelled", grace_s=20))
    await run.wait()
    assert yard.launcher.phases() == ["running", "finishing", "ended"]
    assert (await yard.launcher.wait_for(lambda each: each.phase.phase == "ended")).phase.exit == run.exit()


async def test_lines_have_rank_and_number_and_are_the_same_live_and_stored(attempt, yard):
    run = attempt(["sh", "-c", "echo from $TRAINYARD_RANK"], workers_per_node=3)
    await run.run()
    stored = await run.stored_lines()
    assert {(line.rank, line.text) for line in stored} == {(rank, f"from {rank}") for rank in range(3)}
    live = {line.seq: line for message in yard.launcher.heard for line in message.lines.lines}
    assert all(live[line.seq] == line for line in stored)


async def test_torchrun_workers_get_its_environment_contract(attempt):
    run = attempt(
        ["python-code", CONTRACT],
        runtime="torchrun",
        workers_per_node=2,
        nodes=2,
        node=1,
        master_addr="127.0.0.1",
        master_port=29400,
    )
    await run.run()
    assert json.loads(run.output(3)) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29400",
        "OMP_NUM_THREADS": "1",
        "TRAINYARD_RANK": "3",
        "TRAINYARD_NODE": "1",
        "PYTHONUNBUFFERED": "1",
    }


async def test_a_process_job_is_not_given_a_world(attempt):
    run = attempt(["python-code", CONTRACT])
    await run.run()
    assert json.loads(run.output())["WORLD_SIZE"] is None


async def test_the_first_failing_rank_is_named_with_its_code_and_last_lines(attempt):
    script = 'if [ $TRAINYARD_RANK = 1 ]; then echo "it broke"; exit 7; else sleep 3600; fi'
    exit = await attempt(["sh", "-c", script], workers_per_node=2).run()
    assert (exit.reason, exit.exit_code, exit.first_failing_rank) == ("WorkerFailed", 7, 1)
    assert list(exit.last_lines) == ["it broke"]


async def test_a_worker_ended_by_a_signal_is_reported_with_its_name(attempt):
    exit = await attempt(["sh", "-c", "kill -KILL $$"]).run()
    assert (exit.reason, exit.signal) == ("WorkerFailed", "SIGKILL")
    assert not exit.HasField("exit_code")


async def test_the_message_of_torchs_error_file_is_reported(attempt):
    code = (
        "import json, os; error = {'message': {'message': 'ValueError: bad'}};"
        "json.dump(error, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w')); exit(1)"
    )
    exit = await attempt(["python-code", code], runtime="torchrun").run()
    assert exit.message == "rank 0 ended with exit code 1: ValueError: bad"


async def test_a_command_that_is_not_there_fails_the_start_and_says_where_it_was_looked_for(attempt):
    exit = await attempt(["no-such-program"]).run()
    assert exit.reason == "StartFailed"
    assert "'no-such-program' cannot be run: no program of this name is in PATH" in exit.message
    assert os.environ["PATH"].split(os.pathsep)[-1] in exit.message


async def test_the_lowest_rule_whose_pattern_was_printed_is_reported(attempt):
    rules = [
        {"rule": 0, "pattern": "never"},
        {"rule": 2, "pattern": "out of (gas|memory)"},
        {"rule": 3, "pattern": "CUDA"},
    ]
    exit = await attempt(["sh", "-c", "echo CUDA; echo out of memory; exit 1"], log_rules=rules).run()
    assert exit.matched_rule == 2


async def test_no_rule_is_reported_when_none_matched(attempt):
    exit = await attempt(["sh", "-c", "exit 1"], log_rules=[{"pattern": "never"}]).run()
    assert not exit.HasField("matched_rule")


async def test_a_stop_of_the_launcher_is_a_sigterm_to_the_workers_who_may_clean_up(attempt, yard):
    run = attempt(["sh", "-c", "trap 'echo cleaning up; exit 0' TERM; echo ready; while :; do sleep 0.1; done"])
    await run.start()
    await yard.launcher.wait_for_line("ready")
    yard.launcher.tell(stop("Cancelled", grace_s=20))
    await run.wait()
    assert run.exit().reason == "Stopped"
    assert "cleaning up" in run.output()


async def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_period(attempt, yard):
    run = attempt(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"])
    await run.start()
    await yard.launcher.wait_for_line("ready")
    yard.launcher.tell(stop("DeadlineExceeded", grace_s=0.2))
    await run.wait()
    assert run.exit().reason == "DeadlineExceeded"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_to_the_agent_stops_the_workers(attempt, yard, number):
    run = attempt(["sh", "-c", "echo ready; sleep 3600"])
    await run.start()
    await yard.launcher.wait_for_line("ready")
    run.process.send_signal(number)
    await run.wait()
    assert run.exit().reason == "Stopped"


async def test_a_node_ends_with_the_process_it_is_tied_to(attempt, yard):
    owner = await asyncio.create_subprocess_exec("sleep", "60")
    run = attempt(
        ["sh", "-c", "echo ready; sleep 3600"], tied_to_pid=owner.pid, tied_to_start_time=process_start_time(owner.pid)
    )
    await run.start()
    await yard.launcher.wait_for_line("ready")
    owner.kill()
    await owner.wait()
    await run.wait()
    assert "the process this job belongs to is gone" in run.exit().message


async def test_a_second_agent_in_the_same_folder_leaves_at_once_and_starts_nothing(attempt, yard):
    run = attempt(["sh", "-c", "echo ready; read line < go; echo done"])
    os.mkfifo(run.folder / "go")
    run.folder.joinpath("work").mkdir()
    (run.folder / "work" / "go").symlink_to(run.folder / "go")
    await run.start()
    await yard.launcher.wait_for_line("ready")
    first, run.process = run.process, None
    await run.start()
    assert await run.wait() == 0
    assert not (run.folder / "exit.bin").exists()
    (run.folder / "go").write_text("\n")
    run.process = first
    await run.wait()
    assert run.output() == "ready\ndone\n"


async def test_killing_the_agent_leaves_no_worker(attempt, yard):
    run = attempt(["sh", "-c", "echo pid $$; exec sleep 3600"], workers_per_node=2)
    await run.start()
    pids = [int((await yard.launcher.wait_for_line(f"pid {pid}")).text.split()[1]) for pid in await worker_pids(yard)]
    run.process.kill()
    await run.wait()
    for pid in pids:
        await asyncio.to_thread(gone, pid)


async def test_what_a_worker_left_running_ends_with_the_job(attempt):
    run = attempt(["sh", "-c", "setsid sleep 3600 & echo $!"])
    exit = await run.run()
    assert exit.reason == "Completed"
    await asyncio.to_thread(gone, int(run.output()))


async def worker_pids(yard):
    beat = await yard.launcher.wait_for(lambda each: len(each.heartbeat.workers) == 2)
    return [worker.pid for worker in beat.heartbeat.workers]


def gone(pid):
    """Waits for the end of a process that is no child of this one."""
    try:
        psutil.Process(pid).wait(timeout=PATIENCE_S)
    except psutil.NoSuchProcess:
        return


def stop(reason, grace_s):
    from trainyard_protos.v1 import launcher_pb2

    return launcher_pb2.AgentCommand(stop=launcher_pb2.AgentCommand.Stop(reason=reason, grace_s=grace_s))


async def test_how_far_training_came_is_in_the_record_of_its_end(attempt):
    code = (
        "from trainyard import tracker\n"
        "for s in range(1, 21): tracker.progress(s, 20); tracker.log({'loss': 1}, step=s)"
    )
    run = attempt(["python-code", code])
    far = (await run.run()).progress
    assert (far.step, far.total_steps, dict(far.metrics)) == (20, 20, {})
    assert far.updated_ns


@pytest.mark.parametrize(
    ("reason", "grace_s", "drain_timeout_s", "allowed_s"),
    [("Cancelled", 1, 0, 10), ("Cancelled", 30, 0, 30), ("Cancelled", 30, 120, 120), ("Shutdown", 30, 120, 30)],
)
def test_what_is_lost_with_a_node_has_its_own_time_unless_the_node_is_ended(
    reason, grace_s, drain_timeout_s, allowed_s
):
    assert storing_s(StopOrder(reason, grace_s, ""), drain_timeout_s) == allowed_s
