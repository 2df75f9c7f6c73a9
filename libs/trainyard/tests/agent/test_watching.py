"""Hangs, stacks, and runs of plain processes."""

import asyncio
import os
import subprocess
import sys
import time

import psutil
import pytest
from trainyard.agent.hang import Pulse
from trainyard.home import YardFile, boot_id, process_start_time, write_endpoint
from trainyard_protos.v1 import launcher_pb2, metrics_pb2

from scripts.testbed.ports import free_port

HANG = """
import time
def wait_for_nothing():
    print("hanging", flush=True)
    time.sleep(3600)
wait_for_nothing()
"""


async def test_a_job_without_a_sign_of_life_is_hung_and_its_stacks_are_kept(attempt, yard):
    exit = await attempt(["python-code", HANG], hang_timeout_s=10.0, workers_per_node=2).run()
    assert exit.reason == "Hung"
    assert "Hung" in yard.launcher.notes()
    lines = [line for message in yard.launcher.heard for line in message.lines.lines if line.stream == "stacks"]
    assert {line.rank for line in lines} == {0, 1}
    assert any("wait_for_nothing" in line.text for line in lines)


async def test_time_in_which_the_agent_itself_stood_still_is_no_silence():
    silent = asyncio.ensure_future(Pulse().silent_for(0.5))
    await asyncio.sleep(0)
    time.sleep(1)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not silent.done()
    await silent


async def test_output_is_a_sign_of_life(attempt):
    script = "i=0; while [ $i -lt 40 ]; do i=$((i + 1)); echo $i; sleep 0.3; done"
    exit = await attempt(["sh", "-c", script], hang_timeout_s=10.0).run()
    assert exit.reason == "Completed"


async def test_tracked_values_are_a_sign_of_life(attempt):
    code = "import time; from trainyard import tracker\nfor s in range(40): tracker.log({'a': s}); time.sleep(0.3)"
    exit = await attempt(["python-code", code], hang_timeout_s=10.0).run()
    assert exit.reason == "Completed"


async def test_stacks_of_every_rank_are_taken_on_demand(attempt, yard):
    run = attempt(["python-code", HANG], workers_per_node=2)
    await run.start()
    await yard.launcher.wait_for(lambda each: len(each.heartbeat.workers) == 2)
    await yard.launcher.wait_for_line("hanging")
    command = launcher_pb2.AgentCommand
    yard.launcher.tell(command(stacks=command.TakeStacks(request_id=7)))
    reply = (await yard.launcher.wait_for(lambda each: each.HasField("stacks"))).stacks
    assert reply.request_id == 7
    assert [stacks.rank for stacks in reply.ranks] == [0, 1]
    assert any("wait_for_nothing" in stacks.text for stacks in reply.ranks), reply
    run.process.terminate()
    await run.wait()


async def test_stacks_of_a_worker_without_python_say_so(attempt, yard):
    run = attempt(["sh", "-c", "echo ready; sleep 3600"])
    await run.start()
    await yard.launcher.wait_for_line("ready")
    command = launcher_pb2.AgentCommand
    yard.launcher.tell(command(stacks=command.TakeStacks(request_id=1)))
    reply = (await yard.launcher.wait_for(lambda each: each.HasField("stacks"))).stacks
    assert "run no Python" in reply.ranks[0].error
    run.process.terminate()
    await run.wait()


async def test_an_idle_agent_is_small(attempt, yard):
    run = attempt(["sh", "-c", "echo ready; sleep 3600"])
    await run.start()
    await yard.launcher.wait_for_line("ready")
    await yard.launcher.wait_for(lambda each: each.HasField("heartbeat"))
    assert psutil.Process(run.process.pid).memory_info().rss <= 40 * 1024 * 1024
    run.process.terminate()
    await run.wait()


async def test_a_plain_process_makes_a_run_of_its_own_that_a_yard_gets_when_it_is_up(yard):
    endpoint = YardFile(yard.endpoint, os.getpid(), process_start_time(os.getpid()) or 0, boot_id(), "0", False)
    code = "from trainyard import tracker; tracker.params({'lr': 1}); tracker.log({'loss': 0.5}, step=3)"
    environment = {name: value for name, value in os.environ.items() if name != "TRAINYARD_TRACKER_DIR"}
    environment["TRAINYARD_HOME"] = str(yard.home)
    write_endpoint(yard.home, endpoint)
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    for folder in (yard.home / "offline").glob("*/"):
        await deliver(folder)
    async with yard.metrics_stub() as stub:
        runs = (await stub.ListRuns(metrics_pb2.ListRunsRequest(workspace="default"))).runs
        selector = metrics_pb2.SeriesSelector(workspace="default", run_id=runs[0].id)
        [series] = (await stub.QuerySeries(metrics_pb2.QuerySeriesRequest(selector=selector))).series
    assert [(run.job_id, run.params) for run in runs] == [("", '{"lr": 1}')] * 2
    assert (series.name, list(series.step), list(series.value)) == ("loss", [3], [0.5])
    assert list((yard.home / "offline").iterdir()) == []


async def deliver(folder):
    """Waits for whichever shipper has the folder, and ships what it leaves."""
    import asyncio
    import fcntl

    from trainyard.agent.ship import LOCK_FILE, ship

    try:
        with (folder / LOCK_FILE).open("a") as lock:
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        await ship(folder)
    except FileNotFoundError:
        return  # the shipper has delivered and removed it


@pytest.mark.slow
async def test_two_workers_meet_under_the_environment_contract(attempt):
    code = (
        "import torch, torch.distributed as dist; dist.init_process_group('gloo');"
        "t = torch.ones(1) * (dist.get_rank() + 1);"
        "dist.all_reduce(t); print('sum', int(t)); dist.destroy_process_group()"
    )
    fields = {"runtime": "torchrun", "workers_per_node": 2, "master_addr": "127.0.0.1", "master_port": free_port()}
    run = attempt(["python-code", code], **fields)
    exit = await run.run()
    assert exit.reason == "Completed", exit
    assert [run.output(rank).splitlines()[-1] for rank in (0, 1)] == ["sum 3", "sum 3"]
