"""Services that run apart, as their operator sees them."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from trainyard import errors
from trainyard.home import process_start_time, read_endpoint

from tests.conftest import REPOSITORY, wait_until
from tests.jobs import WAIT_S, document, output, python, running

SERVICES = ["scheduler", "launcher", "metrics", "artifacts"]


@pytest.fixture(scope="module")
def mode():
    return "split"


def ask(yard, service, path, token=""):
    """Status and body of an HTTP request to a service."""
    url = f"http://127.0.0.1:{yard.split.services[service].metrics_port}{path}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_shows_its_health_and_metrics(shared_yard, service):
    assert ask(shared_yard, service, "/healthz")[0] == 200
    # The launcher is ready once its pool is registered.
    wait_until(lambda: ask(shared_yard, service, "/readyz") == (200, "ready\n"), f"{service} to be ready")
    assert ask(shared_yard, service, "/metrics")[0] == 401
    status, body = ask(shared_yard, service, "/metrics", (shared_yard.folder / "token").read_text())
    assert status == 200
    assert f'trainyard_ready{{service="{service}"}} 1.0' in body.splitlines()
    assert "process_resident_memory_bytes" in body


def test_passwords_of_the_services_do_not_reach_the_workers(shared_yard, client):
    job = client.submit(document(python("import os; print(sorted(os.environ.items()))")))
    job.wait(WAIT_S)
    environment = "".join(output(job))
    stores = shared_yard.split.stores
    assert "TRAINYARD_JOB_ID" in environment
    assert stores.broker_url not in environment
    assert stores.bucket.secret_key not in environment
    assert "TRAINYARD_SERVICE_" not in environment


def test_only_the_launcher_can_sign_tokens_of_attempts(shared_yard):
    (shared_yard.folder / "attempt.key").rename(shared_yard.folder / "elsewhere")
    try:
        for name in ("scheduler", "metrics", "artifacts"):
            shared_yard.split.services[name].restart()
    finally:
        (shared_yard.folder / "elsewhere").rename(shared_yard.folder / "attempt.key")


def test_no_client_ends_services_that_run_apart(shared_yard):
    refused = shared_yard.run("down", "--yes")
    assert refused.returncode == 6
    assert "run apart" in refused.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_that_is_asked_to_end_ends_gracefully(shared_yard, client, service):
    process = shared_yard.split.services[service]
    process.stop()
    assert process.process.returncode == 0
    process.start()
    client.submit(document(["true"])).wait(WAIT_S)


@pytest.mark.parametrize("service", SERVICES)
def test_a_job_goes_on_while_a_service_is_away(shared_yard, client, tmp_path, service):
    os.mkfifo(tmp_path / "gate")
    code = "import sys; print('ready', flush=True); open(sys.argv[1]).read(); print('through')"
    job = client.submit(document(python(code, str(tmp_path / "gate"))))
    running(job)
    shared_yard.split.services[service].kill()
    with open(tmp_path / "gate", "w") as gate:
        gate.write("\n")
    shared_yard.split.services[service].start()
    assert job.wait(WAIT_S).attempt == 1
    assert output(job) == ["ready", "through"]


def test_a_follower_goes_on_over_a_restart_of_the_scheduler(shared_yard, client, tmp_path):
    os.mkfifo(tmp_path / "gate")
    code = "import sys; print('ready', flush=True); open(sys.argv[1]).read(); print('through')"
    job = client.submit(document(python(code, str(tmp_path / "gate"))))
    follower = shared_yard.spawn("logs", "-f", job.id)
    assert "ready" in follower.stdout.readline()
    shared_yard.split.services["scheduler"].kill()
    shared_yard.split.services["scheduler"].start()
    with open(tmp_path / "gate", "w") as gate:
        gate.write("\n")
    rest, _ = follower.communicate(timeout=WAIT_S)
    assert (follower.returncode, "through" in rest) == (0, True)


def test_a_call_to_a_service_that_is_away_says_that_it_is(shared_yard):
    metrics = shared_yard.split.services["metrics"]
    metrics.stop()
    try:
        with shared_yard.client() as client, pytest.raises(errors.NotRunning, match="metrics service is not reachable"):
            client.series("01a1f9c2-de63-70c9-be3d-565654c676cd", "loss")
    finally:
        metrics.start()


def program(service, *arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", f"trainyard_{service}", *arguments],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


@pytest.mark.parametrize("service", SERVICES)
def test_help_teaches_every_option_and_setting(service):
    told = program(service, "--help")
    assert told.returncode == 0
    assert "--listen" in told.stdout
    assert f"TRAINYARD_{service.upper()}_" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "environ", "told"),
    [
        ([], {}, "home (--home or TRAINYARD_SERVICE_HOME): Field required"),
        (["--listen", "7001"], {}, "'7001' is not host:port"),
        (["--database-url", "mysql://x"], {}, "database_url (--database-url or TRAINYARD_SERVICE_DATABASE_URL)"),
        (["--tls-cert", "cert.pem"], {}, "tls_cert and tls_key go together"),
        ([], {"TRAINYARD_SERVICE_DATABSE_URL": "x"}, "databse_url"),
    ],
)
def test_a_wrong_option_is_named(tmp_path, arguments, environ, told):
    given = [] if not arguments and not environ else ["--home", str(tmp_path), "--listen", "127.0.0.1:0"]
    refused = program("metrics", *given, *arguments, **environ)
    assert refused.returncode == 2
    assert told in refused.stderr


def test_a_wrong_setting_is_named_with_the_nearest_one(shared_yard):
    arguments = ["--home", str(shared_yard.folder), "--listen", "127.0.0.1:0"]
    refused = program("metrics", *arguments, TRAINYARD_METRICS_MAX_BATCH_BYTE="1")
    assert refused.returncode == 1
    assert "did you mean TRAINYARD_METRICS_MAX_BATCH_BYTES?" in refused.stderr


def test_beyond_loopback_a_service_wants_tls(shared_yard, tmp_path):
    (tmp_path / "token").write_text("a-token-of-some-length")
    (tmp_path / "attempt.pub").write_bytes((shared_yard.folder / "attempt.pub").read_bytes())
    refused = program("metrics", "--home", str(tmp_path), "--listen", "0.0.0.0:0")
    assert refused.returncode == 1
    assert "without TLS" in refused.stderr


def test_everything_ends_with_the_process_that_owns_it(tmp_path):
    home = tmp_path / "home"
    environ = os.environ | {"TRAINYARD_HOME": str(home)}
    script = REPOSITORY / "scripts" / "services"
    up = subprocess.run([script, "up"], env=environ, capture_output=True, text=True, timeout=WAIT_S)
    assert up.returncode == 0, up.stderr + (home / "services.log").read_text()
    pids = [int(line.split()[3]) for line in up.stdout.splitlines()]
    assert len(pids) == 8
    os.kill(read_endpoint(home).pid, signal.SIGKILL)
    wait_until(lambda: not any(process_start_time(pid) for pid in pids), "the end of all servers")
