"""A yard's own life: it comes up, goes down, comes back where it was."""

import json
import os
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from trainyard.home import read_endpoint
from trainyard_protos.v1 import scheduler_pb2

from scripts.testbed.ports import free_port
from tests.conftest import wait_until
from tests.jobs import WAIT_S, document, output, python, running


@pytest.fixture(scope="module")
def mode():
    """The yard of one machine alone has a life that commands begin and end."""
    return "embedded"


HELD = python("import sys; print('ready', flush=True); open(sys.argv[1]).read(); print('through')")


def test_up_twice_is_one_yard_and_down_twice_is_no_error(home):
    home.up()
    first = read_endpoint(home.folder)
    home.up()
    assert read_endpoint(home.folder) == first
    home.down()
    home.down()
    home.assert_nothing_left()


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("{")])
def test_a_yard_is_found_and_ends_also_when_its_file_was_removed_or_damaged(home, damage):
    home.up()
    first = read_endpoint(home.folder)
    os.kill(first.pid, signal.SIGSTOP)  # a yard that hangs is not taken for none
    damage(home.folder / "yard.json")
    refused = home.run("down", "-y")
    os.kill(first.pid, signal.SIGCONT)
    assert refused.returncode == 70 and "yard.lock, but" in refused.stderr
    wait_until(lambda: read_endpoint(home.folder) == first, "the yard to say again where it is")
    home.down()
    home.assert_nothing_left()
    assert not (home.folder / "yard.json").exists()


def test_a_yard_is_up_only_when_every_service_is(make_home):
    home = make_home(TRAINYARD_METRICS_NOPE="1")
    refused = home.run("up")
    assert refused.returncode == 2
    assert "TRAINYARD_METRICS_NOPE" in refused.stderr
    home.assert_nothing_left()


def test_a_home_that_cannot_be_made_is_told_with_what_to_do(home):
    home.environ["TRAINYARD_HOME"] = "/proc/nowhere"
    refused = home.run("up")
    assert (refused.returncode, "TRAINYARD_HOME" in refused.stderr) == (2, True)


def test_options_that_a_running_yard_would_ignore_are_a_conflict(yard):
    refused = yard.run("up", "--metrics-port", "1")
    assert refused.returncode == 6
    assert "--metrics-port 1 would change nothing" in refused.stderr


def test_a_job_goes_on_without_a_yard_and_the_next_one_finds_it(yard, tmp_path):
    os.mkfifo(tmp_path / "gate")
    with yard.client() as client:
        job = client.submit(document([*HELD, str(tmp_path / "gate")]))
        wait_until(lambda: "ready" in output(job), "the job")
    endpoint = read_endpoint(yard.folder).endpoint
    assert yard.run("down", "-y", "--leave-jobs").returncode == 0
    (tmp_path / "gate").write_text("")
    yard.up()
    assert read_endpoint(yard.folder).endpoint == endpoint
    with yard.client() as client:
        back = client.job(job.id)
        assert back.wait(WAIT_S).attempt == 1
        assert output(back) == ["ready", "through"]
        ended = [event for event in client.events() if event.kind == "Yard"]
    assert [(event.type, event.actor, event.message) for event in ended] == [
        ("ShutdownRequested", "user/127.0.0.1", "jobs keep running")
    ]


def test_a_watch_goes_on_over_a_restart_of_the_yard(yard):
    with yard.client() as client:
        watch = client.watch()
        first = client.submit(document(["true"], "before"))
        seen = [next(watch)]
        first.wait(WAIT_S)
        yard.kill()
        yard.up()
        second = client.submit(document(["true"], "after"))
        while (seen[-1].object_id, seen[-1].type) != (second.id, "Succeeded"):
            seen.append(next(watch))
        jobs = [event for event in seen if event.kind == "Job"]
        assert [event.type for event in jobs if event.object_id == first.id] == [e.type for e in first.events()]
        assert [event.seq for event in seen] == sorted({event.seq for event in seen})


def test_a_key_is_known_over_a_restart_of_the_yard(yard):
    with yard.client() as client:
        first = client.submit(document(["true"]), idempotency_key="kept")
        first.wait(WAIT_S)
        yard.kill()
        yard.up()
        assert client.submit(document(["true"]), idempotency_key="kept").id == first.id


def test_a_yard_in_the_foreground_ends_with_its_terminal(home):
    command = home.spawn("up", "--foreground")
    wait_until(lambda: read_endpoint(home.folder), "the yard")
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=WAIT_S)
    assert command.returncode == 0
    home.assert_nothing_left()


def test_prometheus_can_read_a_yard_with_its_token(home):
    port = free_port()
    assert home.run("up", "--metrics-port", str(port)).returncode == 0
    with home.client() as client:
        client.submit(document(["true"])).wait(WAIT_S)
        assert client.info().metrics_url == f"http://127.0.0.1:{port}/metrics"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S)
    token = (home.folder / "token").read_text()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        lines = answer.read().decode().splitlines()
    assert 'trainyard_ready{service="metrics"} 1.0' in lines
    assert any(line.startswith("trainyard_grpc_calls_total{") for line in lines)
    assert any(line.startswith("process_resident_memory_bytes") for line in lines)
    home.down()


@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="IPv6 is off")
def test_a_yard_on_the_ipv6_loopback_runs_jobs(home):
    port = free_port()
    started = home.run("up", "--host", "::1", "--metrics-port", str(port))
    endpoint = read_endpoint(home.folder).endpoint
    assert endpoint.startswith("[::1]:")
    assert endpoint in started.stdout
    with home.client() as client:
        job = client.submit(document(["echo", "hello"]))
        job.wait(WAIT_S)
        assert "hello" in output(job)
        metrics_url = client.info().metrics_url
    assert metrics_url == f"http://[::1]:{port}/metrics"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(metrics_url, timeout=WAIT_S)
    token = home.folder / "token"
    assert home.run("context", "add", "here", "--endpoint", endpoint, "--token-file", token).returncode == 0
    assert home.run("context", "use", "here").returncode == 0
    assert home.run("jobs").returncode == 0
    home.down()


def test_a_job_can_come_from_standard_input(home):
    result = home.run("run", "-", input=json.dumps(document(["echo", "from a pipe"])))
    assert result.returncode == 0, result.stderr
    assert "from a pipe" in result.stdout.splitlines()
    home.assert_nothing_left()


def test_a_job_that_waits_for_its_code_can_be_cancelled(yard):
    with socket.create_server(("127.0.0.1", 0)) as silent, yard.client() as client:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/repository.git"
        job = client.submit(document(["true"], code={"git": {"url": url, "ref": "main"}}, gracePeriod="1s"))
        connection, _ = silent.accept()
        with connection:
            assert job.status().state == scheduler_pb2.JOB_STATE_STARTING
            job.cancel()
            ended = job.wait(WAIT_S, check=False)
    assert ended.reason == "Cancelled"


def test_a_running_job_that_is_cancelled_by_its_name_ends(yard):
    with yard.client() as client:
        job = client.submit(document(["sleep", "600"], "sleeper", gracePeriod="1s"))
        running(job)
        assert yard.run("cancel", "sleeper", "-m", "no longer needed").returncode == 0
        assert job.wait(WAIT_S, check=False).reason == "Cancelled"
