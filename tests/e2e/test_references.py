"""Which job a command means, and what becomes of a job that no machine can hold."""

import json
import os
import pty
import re

import pytest

from tests.conftest import YARD, wait_until
from tests.jobs import WAIT_S, document


@pytest.fixture(scope="module")
def mode():
    """References are resolved by the scheduler and wide tables by the command: both are the same in every mode."""
    return "embedded"


def submit(client, name, command=("true",), **spec):
    return client.submit(document(command, name, **spec))


def job_of(home, *arguments):
    answer = home.run(*arguments, "-o", "json")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    return found.get("id") or found["job"]["id"]


def on_a_terminal(home, *arguments):
    """What a command writes to a narrow terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(home.environ, COLUMNS="20", TERM="xterm", NO_COLOR="1")
        os.execv(YARD, [str(YARD), *arguments])
    written = b""
    try:
        while chunk := os.read(terminal, 65536):
            written += chunk
    except OSError:  # the command has ended
        pass
    os.waitpid(pid, 0)
    os.close(terminal)
    return written.decode()


def test_a_name_selects_its_newest_job_and_a_number_an_earlier_one(shared_yard, client):
    jobs = [submit(client, "named") for _ in range(2)]
    for job in jobs:
        job.wait(WAIT_S)
    found = [job_of(shared_yard, command, each) for command, each in (("status", "named"), ("explain", "named#1"))]
    assert found == [jobs[1].id, jobs[0].id]
    assert shared_yard.run("logs", "-f", "named").returncode == 0
    assert client.job("named#1").id == jobs[0].id
    assert client.run("named#1").job_id == jobs[0].id
    listed = shared_yard.run("jobs", "--name", "named").stdout
    assert re.findall(r"named#\d", listed) == ["named#2", "named#1"]


def test_age_counts_from_the_newest_job(shared_yard, client):
    older, newest = (submit(client, name) for name in ("older", "newest"))
    newest.wait(WAIT_S)
    assert [job_of(shared_yard, "status", each) for each in ("@last", "@-1", "@-2")] == [
        newest.id,
        newest.id,
        older.id,
    ]
    wrong = shared_yard.run("status", "@second")
    assert (wrong.returncode, "@-2" in wrong.stderr) == (2, True)


def test_a_cancel_by_name_needs_exactly_one_live_job(shared_yard, client):
    ended = submit(client, "live")
    ended.wait(WAIT_S)
    running = [submit(client, "live", ["sleep", "600"], gracePeriod="1s") for _ in range(2)]
    refused = shared_yard.run("cancel", "live")
    assert refused.returncode == 6
    assert "live#2" in refused.stderr and "live#3" in refused.stderr and "live#1" not in refused.stderr
    for reference, job in (("live#3", running[1]), ("live", running[0])):
        assert shared_yard.run("cancel", reference).returncode == 0
        job.wait(WAIT_S, check=False)
        assert job.status().message == "cancelled by the user"


def test_commands_that_wait_for_a_job_that_never_fits_say_what_to_change(shared_yard, client, tmp_path):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(document(["true"], "never", resources={"cpu": 100, "memory": "1Gi"})))
    submitted = shared_yard.run("submit", path)
    assert (submitted.returncode, "can never start (NeverFits)" in submitted.stderr) == (0, True)
    for command in (["run", path], ["logs", "-f", "never#1"]):
        ended = shared_yard.run(*command)
        assert ended.returncode == 6, ended.stdout + ended.stderr
        assert "can never start (NeverFits)" in ended.stderr
        assert "Lower spec.resources" in ended.stderr
        assert "yard cancel never#" in ended.stderr
    shown = " ".join(on_a_terminal(shared_yard, "jobs", "--name", "never").split())
    assert shown.count("Lower spec.resources or spec.workersPerNode") == 2
    for job in client.list(name_contains="never"):
        assert shared_yard.run("cancel", job.id).returncode == 0


def test_a_yard_does_not_go_down_over_jobs_without_a_confirmation(shared_yard, client):
    job = submit(client, "kept", ["sleep", "600"], gracePeriod="1s")
    refused = shared_yard.run("down")
    assert refused.returncode == 6
    for text in ("1 job: kept#1", "yard down --yes", "yard down --leave-jobs"):
        assert text in refused.stderr
    assert client.job(job.id).status().state != "cancelled"
    wait_until(lambda: client.job(job.id).status().started_ns, "the job to run")
    assert not client.job(job.id).status().ended_ns
    shared_yard.run("cancel", "kept")


def test_a_run_on_its_own_yard_leaves_nothing_when_the_job_never_fits(home, tmp_path):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(document(["true"], "never", resources={"cpu": 100, "memory": "1Gi"})))
    ended = home.run("run", path)
    assert (ended.returncode, "Lower spec.resources" in ended.stderr) == (6, True), ended.stdout + ended.stderr
    home.assert_nothing_left()


def write_job(folder, command=("python", "train.py"), **spec):
    folder.mkdir()
    (folder / "train.py").write_text("import os, sys\nprint(os.environ.get('COLOUR'), *sys.argv[1:])\n")
    path = folder / "job.json"
    path.write_text(json.dumps(document(command, "file", code={"path": "."}, **spec)))
    return path


def test_options_of_run_replace_what_the_file_says(shared_yard, client, tmp_path):
    path = write_job(tmp_path / "code", workersPerNode=2)
    options = ["--name", "renamed", "--set", "spec.workersPerNode=1", "--env", "COLOUR=green"]
    ended = shared_yard.run("run", path, *options, "--", "--epochs", "3")
    assert ended.returncode == 0, ended.stderr
    assert "green --epochs 3" in ended.stdout.splitlines()
    assert client.job("renamed").status().workers_per_node == 1
    refused = shared_yard.run("submit", path, "--set", "spec.workersPerNod=1", "--env", "COLOUR")
    assert refused.returncode == 2
    assert "--env COLOUR: not KEY=VALUE" in refused.stderr
    refused = shared_yard.run("submit", path, "--set", "spec.workersPerNod=1")
    assert "--set spec.workersPerNod: spec.workersPerNod: " in refused.stderr
    assert "did you mean workersPerNode?" in refused.stderr
    assert len(list(client.list(name_contains="file"))) == 0


def test_a_dry_run_finds_what_a_submission_would_find_and_stores_nothing(shared_yard, client, tmp_path):
    path = write_job(tmp_path / "code")
    shown = shared_yard.run("run", "--dry-run", path, "--set", "spec.nodes=1", "--", "--epochs", "3")
    assert shown.returncode == 0, shown.stderr
    for text in ("--epochs", "code: 2 files", "would start at once"):
        assert text in shown.stdout
    missing = shared_yard.run("submit", "--dry-run", path, "--set", "spec.code.path=elsewhere", "-o", "json")
    assert (missing.returncode, "elsewhere" in missing.stderr) == (2, True)
    unknown = shared_yard.run("run", "--dry-run", path, "--set", "spec.inputs=[{artifact: no-such, path: data}]")
    assert (unknown.returncode, "spec.inputs[0].artifact" in unknown.stderr) == (2, True)
    never = shared_yard.run("submit", "--dry-run", path, "--set", "spec.resources.cpu=100")
    assert (never.returncode, "Lower spec.resources" in never.stderr) == (6, True)
    with (path.parent / "huge.bin").open("wb") as huge:
        huge.truncate(300 << 20)
    large = shared_yard.run("run", "--dry-run", path)
    assert (large.returncode, "huge.bin" in large.stderr) == (2, True)
    assert not list(client.list(name_contains="file"))
    assert not [each for each in client.artifacts() if each.name.startswith("file")]


def test_a_dry_run_needs_no_yard_that_is_up(home, tmp_path):
    shown = home.run("run", "--dry-run", write_job(tmp_path / "code"))
    assert (shown.returncode, "would start at once" in shown.stdout) == (0, True), shown.stderr
    home.assert_nothing_left()
