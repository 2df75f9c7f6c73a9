"""How attempts end, and what the spec says should follow."""

import pytest

from tests.conftest import wait_until
from tests.jobs import WAIT_S, document, output, python, reasons

FIRST_ATTEMPT_FAILS = "import os, signal, sys\nif os.environ['TRAINYARD_ATTEMPT'] == '1':\n    "
NOW = "0s"
MIB = 2**20


def run(client, code, **spec):
    job = client.submit(document(python(code), **spec))
    return job, job.wait(WAIT_S, check=False)


@pytest.mark.parametrize(
    ("failure", "rule"),
    [
        ("sys.exit(3)", {"exitCodes": [3, 4]}),
        ("os.kill(os.getpid(), signal.SIGUSR1)", {"signals": ["SIGUSR1"]}),
        ("sys.exit('the gradient is not finite')", {"logPattern": "gradient .* finite"}),
        ("sys.exit(1)", {"reasons": ["WorkerFailed"]}),
        ("sys.exit('lost peer')", {"exitCodes": [1], "logPattern": "^lost", "reasons": ["WorkerFailed"]}),
    ],
)
def test_a_rule_that_matches_the_failure_retries_for_free(client, failure, rule):
    retries = {"limit": 0, "backoff": NOW, "rules": [rule | {"action": "retryFree"}]}
    job, ended = run(client, FIRST_ATTEMPT_FAILS + failure, retries=retries)
    assert reasons(job) == ["WorkerFailed", "Completed"]
    assert (ended.retries_used, ended.free_retries_used) == (0, 1)


@pytest.mark.parametrize(
    ("failure", "rule"),
    [
        ("sys.exit(5)", {"exitCodes": [3, 4]}),
        ("os.kill(os.getpid(), signal.SIGUSR2)", {"signals": ["SIGUSR1"]}),
        ("sys.exit('all is well')", {"logPattern": "gradient .* finite"}),
        ("sys.exit(1)", {"reasons": ["Hung"]}),
        ("sys.exit('found')", {"exitCodes": [9], "logPattern": "^found"}),
    ],
)
def test_a_rule_that_does_not_match_leaves_the_failure_to_the_budget(client, failure, rule):
    retries = {"limit": 0, "backoff": NOW, "rules": [rule | {"action": "retryFree"}]}
    _, ended = run(client, FIRST_ATTEMPT_FAILS + failure, retries=retries)
    assert (ended.reason, ended.attempt) == ("WorkerFailed", 1)


def test_a_rule_can_end_the_job_whatever_its_budget(client):
    retries = {"limit": 5, "backoff": NOW, "rules": [{"logPattern": "CUDA out of memory", "action": "fail"}]}
    _, ended = run(client, "raise RuntimeError('CUDA out of memory')", retries=retries)
    assert (ended.reason, ended.attempt) == ("WorkerFailed", 1)
    assert "rule 0" in ended.message


def test_the_budget_bounds_retries(client):
    job, ended = run(client, "raise SystemExit(9)", retries={"limit": 2, "backoff": NOW})
    assert (ended.reason, ended.attempt, ended.retries_used) == ("RetryLimit", 3, 2)
    assert [attempt.exit.exit_code for attempt in job.status().attempts] == [9, 9, 9]


def test_free_retries_are_capped(client):
    retries = {"limit": 0, "backoff": NOW, "rules": [{"exitCodes": [143], "action": "retryFree"}]}
    _, ended = run(client, "raise SystemExit(143)", retries=retries)
    assert (ended.reason, ended.attempt, ended.free_retries_used) == ("RetryLimit", 11, 10)


def test_a_retry_waits_for_its_backoff_and_says_so(client):
    job = client.submit(document(["false"], retries={"limit": 1, "backoff": "5m"}))
    wait_until(lambda: job.status().pending.reason == "Backoff", "the wait before the retry")
    waiting = job.status()
    assert waiting.pending.not_before_ns - waiting.updated_ns > 250e9
    assert "retry" in job.explain().summary
    job.cancel()
    assert job.wait(WAIT_S, check=False).reason == "Cancelled"


def test_a_failure_names_its_rank_its_exception_its_memory_and_its_last_lines(client):
    code = """
        import os, time
        print("before the end", flush=True)
        if os.environ["RANK"] == "1":
            raise ValueError("cannot find the data")
        time.sleep(600)
    """
    job, ended = run(client, code, runtime="torchrun", workersPerNode=2)
    exit = ended.exit
    assert (exit.reason, exit.exit_code) == ("WorkerFailed", 1)
    assert (exit.first_failing_rank, exit.node, exit.local_rank) == (1, 0, 1)
    assert exit.meaning == "exit code 1: Python raised ValueError: cannot find the data"
    assert (exit.last_lines[0], exit.last_lines[-1]) == ("before the end", "ValueError: cannot find the data")
    assert 0 < exit.memory.peak_bytes <= exit.memory.limit_bytes
    assert exit.memory.limit_bytes >= 2 * 256 * MIB
    assert job.explain().job.exit == exit


def test_the_node_whose_worker_raised_is_named_though_its_peer_on_another_node_ended_first(client, tmp_path):
    code = """
        import atexit, os, sys, time
        raised = os.path.join(sys.argv[1], "raised")
        if os.environ["RANK"] == "1":
            atexit.register(lambda: (open(raised, "w").close(), time.sleep(600)))
            raise ValueError("no such label")
        while not os.path.exists(raised):
            time.sleep(0.01)
        raise RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [::1]:12721")
    """
    job = client.submit(document(python(code, str(tmp_path)), runtime="torchrun", nodes=2))
    exit = job.wait(WAIT_S, check=False).exit
    assert (exit.reason, exit.first_failing_rank, exit.node, exit.local_rank) == ("WorkerFailed", 1, 1, 0)
    assert exit.meaning == "Python raised ValueError: no such label"
    assert exit.last_lines[-1] == "ValueError: no such label"


def test_a_job_beyond_its_deadline_is_stopped_and_not_tried_again(client):
    _, ended = run(
        client, "import time; time.sleep(600)", deadline="500ms", gracePeriod="1s", retries={"limit": 3, "backoff": NOW}
    )
    assert (ended.reason, ended.attempt) == ("DeadlineExceeded", 1)


def test_a_stopped_worker_has_its_grace_period(client):
    code = """
        import signal, sys, time
        def save(*_):
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready")
        time.sleep(600)
    """
    job = client.submit(document(python(code), gracePeriod="60s"))
    wait_until(lambda: "ready" in output(job), "the worker")
    job.cancel("enough of it")
    ended = job.wait(WAIT_S, check=False)
    assert ended.reason == "Cancelled"
    assert output(job) == ["ready", "saved"]
    assert "enough of it" in [event.message for event in job.events()]


def test_the_end_of_one_worker_ends_the_others(client):
    code = """
        import os, time
        if os.environ["RANK"] == "0":
            raise SystemExit(4)
        time.sleep(600)
    """
    _, ended = run(client, code, runtime="torchrun", nodes=2, workersPerNode=2, gracePeriod="1s")
    assert (ended.exit.reason, ended.exit.first_failing_rank, ended.exit.exit_code) == ("WorkerFailed", 0, 4)


def test_a_worker_beyond_its_memory_ends_as_out_of_memory(client):
    code = """
        blocks = []
        while True:
            blocks.append(bytearray(b"x" * (8 << 20)))
    """
    _, ended = run(client, code, resources={"cpu": "500m", "memory": "32Mi"})
    if any("limits are not enforced here" in event.message for event in client.events()):
        pytest.skip("this machine does not let the yard limit memory")
    assert ended.exit.reason == "OutOfMemory"
    assert ended.exit.memory.oom_kills >= 1
    assert ended.exit.memory.peak_bytes > 32 * MIB
    assert "raise spec.resources.memory" in ended.exit.meaning


def test_a_program_that_is_not_there_fails_the_job_and_names_it(client):
    job = client.submit(document(["no-such-program-anywhere"]))
    ended = job.wait(WAIT_S, check=False)
    assert ended.reason == "StartFailed"
    assert "no-such-program-anywhere" in ended.message


def test_a_failed_job_goes_on_when_its_user_says_so(client, tmp_path):
    job, ended = run(client, f"open({str(tmp_path / 'gate')!r})")
    assert ended.reason == "WorkerFailed"
    (tmp_path / "gate").touch()
    job.retry()
    assert job.wait(WAIT_S).attempt == 2
    assert "RetriedByUser" in [event.type for event in job.events()]
