"""Real kills against a real yard: nothing is lost, nothing happens twice, nothing is left behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import grpc
import psutil
import pytest
from trainyard.channel import connect
from trainyard.errors import Conflict
from trainyard.home import read_endpoint
from trainyard_protos.v1 import artifacts_pb2, artifacts_pb2_grpc

from scripts.testbed.patience import PATIENCE_S
from tests.conftest import is_worker, wait_until

COUNTER = """
    import os, pathlib, re, time
    from trainyard import tracker

    STEPS = 60
    gate = os.environ.get("GATE")  # the first attempt waits for it between two checkpoints
    rank = int(os.environ["RANK"])
    folder = pathlib.Path("checkpoints")
    folder.mkdir(exist_ok=True)
    resume = os.environ.get("TRAINYARD_RESUME_FROM")
    start = int(re.search(r"step-(\\d+)", resume)[1]) if resume else 0
    print(f"starting after step {start} in attempt {os.environ['TRAINYARD_ATTEMPT']}", flush=True)
    for step in range(start + 1, STEPS + 1):
        time.sleep(0.1)
        while step == 25 and gate and os.environ["TRAINYARD_ATTEMPT"] == "1" and not pathlib.Path(gate).exists():
            time.sleep(0.05)
        if rank == 0:
            tracker.log({"loss": 1.0 / step}, step=step)
            if step % 10 == 0:
                draft = folder / "draft"
                draft.write_text(f"weights {step}")
                draft.rename(folder / f"step-{step}.txt")
    print("done", flush=True)
"""

SPEC = """
    runtime: torchrun
    command: [python, train.py]
    code: {path: .}
    workersPerNode: 2
    resources: {cpu: 500m, memory: 256Mi}
    checkpoints: {path: checkpoints, pattern: "step-{step}.txt"}
    retries: {limit: 3, backoff: 100ms}
    gracePeriod: 5s
"""


def starts(client, job):
    """The attempts in which each rank said that it started, from the stored logs."""
    return sorted(
        (line.attempt, line.line.rank) for line in client.job(job.id).logs() if "starting after step" in line.line.text
    )


def loss_steps(job):
    return list(job.metrics("loss")["loss"].step)


def stored_steps(client, job):
    return {version.checkpoint.step for version in client.versions(kind="checkpoint", job=job.id)}


@pytest.fixture
def gate(tmp_path):
    """What the first attempt waits for, some steps beyond its second checkpoint."""
    return tmp_path / "gate"


def gated(gate):
    return f"{SPEC}    env: {{GATE: {gate}}}\n"


@pytest.fixture
def counting(yard, job_file, gate):
    """A job of two workers that is some steps beyond a stored checkpoint, and waits there."""
    client = yard.client()
    job = client.submit(job_file(COUNTER, gated(gate)))
    wait_until(lambda: 20 in stored_steps(client, job), "the checkpoint of step 20")
    yield client, job
    client.close()


def test_a_killed_worker_is_resumed_from_its_checkpoint_without_a_gap_or_a_double(yard, counting):
    _, job = counting
    yard.workers()[0].kill()
    ended = job.wait()
    assert ended.attempt == 2
    assert ended.attempts[0].exit.reason == "WorkerFailed"
    assert ended.attempts[0].exit.signal == "SIGKILL"
    assert loss_steps(job) == list(range(1, 61))
    resumed = [line.line.text for line in job.logs() if line.attempt == 2 and "starting" in line.line.text]
    assert all(not text.startswith("starting after step 0") for text in resumed)


def test_a_killed_yard_does_not_stop_training_and_starts_nothing_twice(yard, counting, gate):
    _, job = counting
    workers = {process.pid for process in yard.workers()}
    yard.kill()
    assert {process.pid for process in yard.workers()} == workers
    gate.touch()
    yard.up()
    with yard.client() as back:
        ended = back.job(job.id).wait()
        assert ended.attempt == 1
        assert starts(back, job) == [(1, 0), (1, 1)]
        assert loss_steps(back.job(job.id)) == list(range(1, 61))


def test_a_yard_killed_many_times_loses_nothing(yard, job_file):
    with yard.client() as client:
        job = client.submit(job_file(COUNTER, SPEC))
    for _ in range(4):
        yard.kill()
        yard.up()
    with yard.client() as back:
        ended = back.job(job.id).wait()
        assert ended.attempt == 1
        assert starts(back, job) == [(1, 0), (1, 1)]
        assert loss_steps(back.job(job.id)) == list(range(1, 61))


def test_a_killed_agent_leaves_no_orphan_and_the_job_is_retried(yard, counting):
    _, job = counting
    before = {process.pid for process in yard.workers()}
    yard.agents()[0].kill()
    ended = job.wait()
    assert [attempt.exit.reason for attempt in ended.attempts] == ["AgentLost", "Completed"]
    assert loss_steps(job) == list(range(1, 61))
    assert not any(psutil.pid_exists(pid) for pid in before)


def test_a_checkpoint_from_which_a_killed_attempt_got_nowhere_is_passed_over(yard, job_file, gate):
    stuck = COUNTER.replace(
        "for step in", "while os.environ['TRAINYARD_ATTEMPT'] == '2': time.sleep(1)\n    for step in"
    )
    with yard.client() as client:
        job = client.submit(job_file(stuck, gated(gate)))
        wait_until(lambda: 20 in stored_steps(client, job), "the checkpoint of step 20")
        yard.workers()[0].kill()
        wait_until(lambda: job.status().attempt == 2 and _workers_heard(client, job), "the second attempt")
        newest = max(stored_steps(client, job))
        yard.agents()[0].kill()
        ended = job.wait()
        assert [attempt.exit.reason for attempt in ended.attempts] == ["WorkerFailed", "AgentLost", "Completed"]
        begins = [line.line.text for line in job.logs() if line.attempt == 3 and "starting after" in line.line.text]
        assert begins[0].startswith(f"starting after step {newest - 10} ")
        assert loss_steps(job) == list(range(1, 61))


def _workers_heard(client, job):
    try:
        return any(worker.pid for node in client.describe(job.id).nodes for worker in node.workers)
    except Conflict:
        return False  # the launcher has not claimed it yet


def test_a_zombie_of_an_old_attempt_cannot_commit_a_checkpoint(yard, counting):
    client, job = counting
    first = job.status()
    plan = next((yard.folder / "attempts" / first.attempt_id).glob("node-0/plan.json"))
    old_token = json.loads(plan.read_text())["token"]
    yard.workers()[0].kill()
    wait_until(lambda: job.status().attempt == 2 and yard.workers(), "the second attempt")
    wait_until(lambda: max(stored_steps(client, job)) > 20, "a checkpoint of the second attempt")

    async def commit():
        async with connect(read_endpoint(yard.folder).endpoint, old_token) as channel:
            await artifacts_pb2_grpc.ArtifactServiceStub(channel).Commit(
                artifacts_pb2.CommitRequest(
                    name=f"checkpoints-{job.id}",
                    kind="checkpoint",
                    producer=artifacts_pb2.Producer(job_id=job.id, attempt_id=first.attempt_id, fence=1),
                    checkpoint=artifacts_pb2.CheckpointInfo(step=999),
                )
            )

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        asyncio.run(commit())
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert 999 not in stored_steps(client, job)
    assert job.wait().attempt == 2


def test_a_start_that_arrives_twice_or_late_starts_nothing(yard, counting, gate):
    client, job = counting
    workers = {process.pid for process in yard.workers()}
    folder = yard.folder / "attempts" / job.status().attempt_id / "node-0"
    again = [sys.executable, "-m", "trainyard.agent", folder]
    assert subprocess.run(again, env=yard.environ, timeout=PATIENCE_S).returncode == 0
    assert {process.pid for process in yard.workers()} == workers
    gate.touch()
    assert job.wait().attempt == 1
    assert subprocess.run(again, env=yard.environ, timeout=PATIENCE_S).returncode == 0
    assert starts(client, job) == [(1, 0), (1, 1)]
    assert loss_steps(job) == list(range(1, 61))


@pytest.mark.parametrize("first", ["yard", "workers"])
def test_a_machine_that_stood_still_for_a_while_is_nobodys_silence(yard, job_file, gate, first):
    with yard.client() as client:
        job = client.submit(job_file(COUNTER, gated(gate) + "    hangTimeout: 10s\n"))
        wait_until(lambda: job.metrics("loss"), "its first steps")
        processes = sorted(yard.processes(), key=is_worker, reverse=first == "workers")
        for process in processes:
            process.suspend()
        time.sleep(15)
        gate.touch()
        for process in processes:
            process.resume()
        assert [attempt.exit.reason for attempt in job.wait().attempts] == ["Completed"]
        assert loss_steps(job) == list(range(1, 61))


HANG = """
    import os, time
    from trainyard import tracker

    def waiting_for_a_peer_that_never_comes():
        while True:
            time.sleep(1)

    if os.environ["TRAINYARD_ATTEMPT"] == "1":
        tracker.log({"loss": 1.0}, step=1)
        waiting_for_a_peer_that_never_comes()
    print("second attempt", flush=True)
"""


HANG_SPEC = """
    command: [python, train.py]
    code: {path: .}
    hangTimeout: 10s
    retries: {limit: 1, backoff: 100ms}
"""


def test_a_hung_worker_is_found_its_stacks_are_kept_and_it_is_retried(yard, job_file):
    with yard.client() as client:
        job = client.submit(job_file(HANG, HANG_SPEC))
        ended = job.wait()
        assert [attempt.exit.reason for attempt in ended.attempts] == ["Hung", "Completed"]
        stacks = [line.line.text for line in job.logs() if line.line.stream == "stacks"]
        assert any("waiting_for_a_peer_that_never_comes" in text for text in stacks)


STUBBORN = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A grandchild in a session of its own that ignores SIGTERM, as data loaders of careless scripts do.
    stubborn = "import signal,time; signal.signal(15, signal.SIG_IGN); print('grandchild', flush=True); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
    print("ready", flush=True)
    time.sleep(600)
"""
STUBBORN_SPEC = "{command: [python, train.py], code: {path: .}, gracePeriod: 1s}\n"


def test_cancel_ends_even_what_ignores_it(yard, job_file):
    with yard.client() as client:
        job = client.submit(job_file(STUBBORN, STUBBORN_SPEC))
        wait_until(lambda: any("grandchild" in line.line.text for line in job.logs()), "the grandchild")
        job.cancel()
        assert job.wait(check=False).reason == "Cancelled"
    wait_until(lambda: len(yard.processes()) == 1, "only the yard to be left")


def test_yard_down_leaves_no_process(home, job_file):
    home.up()
    with home.client() as client:
        job = client.submit(job_file(STUBBORN, STUBBORN_SPEC))
        wait_until(lambda: any("grandchild" in line.line.text for line in job.logs()), "the grandchild")
    home.down()
    home.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_a_killed_command_leaves_no_process(home, job_file, number):
    command = home.spawn("run", job_file(STUBBORN, STUBBORN_SPEC))
    wait_for_line(command, "grandchild")
    os.kill(command.pid, number)
    command.communicate(timeout=PATIENCE_S)
    home.assert_nothing_left()


def test_a_killed_yard_of_one_command_leaves_no_process(home, job_file):
    command = home.spawn("run", job_file(STUBBORN, STUBBORN_SPEC))
    wait_for_line(command, "grandchild")
    home.kill()
    command.communicate(timeout=PATIENCE_S)
    assert command.returncode not in (0, None)
    home.assert_nothing_left()


GATED = """
    import os, pathlib, time
    print("ready", flush=True)
    while not pathlib.Path(os.environ["GATE"]).exists():
        time.sleep(0.05)
    print("reached the end", flush=True)
"""


def test_ctrl_c_detaches_and_the_yard_ends_with_the_job(home, job_file, tmp_path):
    spec = f"{{command: [python, train.py], code: {{path: .}}, env: {{GATE: {tmp_path}/gate}}}}\n"
    command = home.spawn("run", job_file(GATED, spec))
    wait_for_line(command, "ready")
    os.killpg(command.pid, signal.SIGINT)
    output, _ = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 130, output
    assert "detached: " in output
    assert home.processes(), "the job goes on"
    (tmp_path / "gate").touch()
    home.assert_nothing_left()
    home.up()
    with home.client() as client:
        assert client.job("@last").status().reason == "Completed"
    home.down()


def wait_for_line(command, text):
    for line in command.stdout:
        if text in line:
            return
    raise AssertionError(f"the command ended without saying '{text}'")
