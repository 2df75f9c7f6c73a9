"""Which worker failed first, and what the record of the end says about it. Real agents, real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from trainyard.agent.contract import output_file
from trainyard.agent.failure_evidence import SHOWN_LINES, read
from trainyard.agent.first_failure import Evidence, WorkerFailure, first
from trainyard.agent.gang import End
from trainyard.agent.verdict import StopOrder, stopped, worker_failed
from trainyard_protos.v1 import launcher_pb2

from scripts.testbed.ports import free_port

# Rank 0 loses its peer and ends before rank 1, whose traceback is long written, has ended.
ONE_RAISES = """
import atexit, os, sys, time

def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True

def wait(condition):
    while not condition():
        time.sleep(0.01)

if os.environ["TRAINYARD_RANK"] == "0":
    with open("pid.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename("pid.new", "pid")
    wait(lambda: os.path.exists("raised"))
    raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [::1]:12721")

def linger():
    open("raised", "w").close()
    wait(lambda: gone(int(open("pid").read())))

wait(lambda: os.path.exists("pid"))
atexit.register(linger)
raise ValueError("no such\\nlabel")
"""
RAISES_AND_LINGERS = """
import atexit, time
atexit.register(lambda: (print("ending", flush=True), time.sleep(3600)))
raise ValueError("bad data")
"""


async def test_the_worker_that_raised_is_named_not_its_peer_that_ended_before_it(attempt):
    exit = await attempt(["python-code", ONE_RAISES], workers_per_node=2).run()
    assert (exit.first_failing_rank, exit.node, exit.local_rank) == (1, 0, 1)
    assert (exit.exception.type, exit.exception.message) == ("ValueError", "no such")
    assert not exit.lost_peer
    assert exit.last_lines[-2:] == ["ValueError: no such", "label"]
    assert exit.failed_ns


async def test_a_worker_that_raised_before_a_peers_failure_stopped_it_has_failed_itself(attempt, yard):
    run = attempt(["python-code", RAISES_AND_LINGERS])
    await run.start()
    await yard.launcher.wait_for_line("ending")
    stop = launcher_pb2.AgentCommand.Stop(reason="PeerFailed", grace_s=20)
    yard.launcher.tell(launcher_pb2.AgentCommand(stop=stop))
    await run.wait()
    exit = run.exit()
    assert (exit.reason, exit.exception.type) == ("WorkerFailed", "ValueError")
    assert (exit.signal, exit.HasField("exit_code")) == ("", False)  # those are of the stop
    assert exit.message == "rank 0 raised ValueError: bad data"


@pytest.mark.parametrize(
    ("code", "signal", "exit_code", "exception", "last_line"),
    [
        ("import sys; print('so far'); sys.exit(3)", "", 3, "", "so far"),
        ("import os; print('so far', end='', flush=True); os.kill(os.getpid(), 9)", "SIGKILL", None, "", "so far"),
        ("import os; print('so far', flush=True); os.kill(os.getpid(), 11)", "SIGSEGV", None, "", "so far"),
        ("import nothing_like_this", "", 1, "ModuleNotFoundError", None),
        ("raise KeyError('https://me:secret@host/')", "", 1, "KeyError", "KeyError: 'https://host/'"),
    ],
)
async def test_a_failure_has_its_exit_its_exception_and_its_last_lines(
    attempt, code, signal, exit_code, exception, last_line
):
    exit = await attempt(["python-code", code]).run()
    assert (exit.signal, exit.exit_code if exit.HasField("exit_code") else None) == (signal, exit_code)
    assert exit.exception.type == exception
    assert last_line is None or exit.last_lines[-1] == last_line
    assert len(exit.last_lines) <= 20
    assert exit.memory.peak_bytes > 2**20
    assert "secret" not in str(exit)


async def test_memory_that_no_group_counts_is_that_of_the_processes_against_what_was_requested(attempt):
    code = "x = bytearray(b'x' * (96 << 20)); import os; os.kill(os.getpid(), 9)"
    memory = (await attempt(["python-code", code], memory_bytes=2**28).run()).memory
    assert 96 << 20 < memory.peak_bytes < 2**28
    assert (memory.limit_bytes, memory.sampled, memory.enforced) == (2**28, True, False)
    assert not memory.HasField("oom_kills")


async def test_the_report_of_the_installed_torchrun_names_the_worker_that_failed_first(attempt, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '3':\n"
        "    print('loading', flush=True)\n"
        "    raise ValueError('bad data')\n"
        "time.sleep(3600)\n"
    )
    free = f"127.0.0.1:{free_port()}"
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", free]
    command = [Path(sys.executable).with_name("torchrun"), *rendezvous, script]
    run = attempt([str(each) for each in command], runtime="torchrun", workers_per_node=4)
    exit = await run.run()
    assert (exit.first_failing_rank, exit.local_rank, exit.exit_code, exit.output_rank) == (3, 3, 1, 0)
    assert (exit.exception.type, exit.exception.message) == ("ValueError", "bad data")
    assert exit.last_lines[-1] == "ValueError: bad data"
    assert "loading" in exit.last_lines


def failure(rank: int, time_ns: int, **evidence: object) -> WorkerFailure:
    known = {"exception": None, "lost_peer": False} | evidence
    return WorkerFailure(End(rank, rank, 1, "", time_ns), Evidence(**known))


def test_a_recorded_exception_counts_from_when_it_was_recorded():
    found = first([failure(0, 20), failure(1, 30, exception=("ValueError", "bad"), recorded_ns=10)])
    assert (found.end.rank, found.failed_ns) == (1, 10)


def test_where_all_lost_a_peer_the_earliest_explains_the_failure():
    assert first([failure(0, 20, lost_peer=True), failure(1, 10, lost_peer=True)]).end.rank == 1
    assert first([failure(0, 10, lost_peer=True), failure(1, 20)]).end.rank == 1


def test_a_program_that_reports_a_killed_child_did_not_itself_run_out_of_memory():
    """A DataLoader raises when the kernel kills one of its processes: rules on OutOfMemory do not match that."""
    assert worker_failed(failure(0, 10), out_of_memory=True).reason == "WorkerFailed"
    killed = WorkerFailure(End(0, 0, None, "SIGKILL", 10), Evidence(None, lost_peer=False))
    assert worker_failed(killed, out_of_memory=True).reason == "OutOfMemory"
    assert worker_failed(killed, out_of_memory=False).reason == "WorkerFailed"


def test_a_worker_that_was_stopped_keeps_that_it_had_lost_a_peer():
    lost = worker_failed(failure(1, 10, exception=("RuntimeError", "gloo"), lost_peer=True), out_of_memory=False)
    noted = stopped(StopOrder("Shutdown", 1.0, "a peer failed"), lost)
    assert (noted.reason, noted.lost_peer, noted.failed_ns, noted.first_failing_rank) == ("Stopped", True, 10, 1)


def traceback_of(name: str, mark: str = "") -> str:
    return "".join(f"{mark}{line}\n" for line in ("Traceback (most recent call last):", "  File", f"{name}: bad"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (traceback_of("ValueError") + "ending\n" * (SHOWN_LINES - 1), ("ValueError", "bad")),
        (traceback_of("ValueError") + "training\n" * SHOWN_LINES, None),
        (traceback_of("KeyError", "[rank3]: ") + traceback_of("ValueError", "[rank2]: "), ("KeyError", "bad")),
        (traceback_of("KeyError") + traceback_of("ValueError"), ("ValueError", "bad")),
    ],
    ids=["in the last lines", "long before the end", "of its own rank", "the last one"],
)
def test_the_exception_is_that_of_the_last_traceback_of_the_worker_near_its_end(tmp_path, text, found):
    file = Path(output_file(str(tmp_path), 3))
    file.parent.mkdir()
    file.write_text(text)
    assert read(str(tmp_path), 3).exception == found
