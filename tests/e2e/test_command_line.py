"""The command `yard` against a real yard, as a person or a script in a pipe uses it."""

import io
import json
import os

import pytest
from ruamel.yaml import YAML

from scripts.testbed.patience import PATIENCE_S
from tests.conftest import wait_until
from tests.jobs import WAIT_S, document, output, python

TRACKS = """
    import os
    from trainyard import tracker
    for step in range(1, 21):
        tracker.log({"loss": 1 / step}, step=step)
    for number in range(5):
        print(f"line {number} of rank {os.environ['TRAINYARD_RANK']}")
"""


@pytest.fixture(scope="module")
def done(client):
    """A job of two workers that has succeeded, with a label, a series and an output."""
    spec = {"workersPerNode": 2, "labels": {"team": "vision"}, "outputs": [{"path": "made", "artifact": "made"}]}
    job = client.submit(document(python(TRACKS + "    open('made', 'w').write('content')\n"), "cli-done", **spec))
    job.wait(WAIT_S)
    return job


@pytest.fixture
def held(client, tmp_path):
    """A running job that waits in a function of a name of its own."""
    code = """
        import sys
        def waiting_for_the_gate():
            print("waiting", flush=True)
            open(sys.argv[1]).read()
        waiting_for_the_gate()
        print("through", flush=True)
    """
    os.mkfifo(tmp_path / "gate")
    job = client.submit(document(python(code, str(tmp_path / "gate")), "cli-held", env={"COLOUR": "green"}))
    wait_until(lambda: "waiting" in output(job), "the job to wait")
    yield job, lambda: (tmp_path / "gate").write_text("")
    job.status().ended_ns or job.cancel()


def job_file(folder, command, name="cli", **spec):
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document(command, name, **spec)))
    return path


def read_yaml(text):
    return YAML(typ="safe").load(io.StringIO(text))


def test_a_run_in_a_pipe_is_plain_lines_and_ends_with_a_summary(shared_yard, tmp_path):
    result = shared_yard.run("run", job_file(tmp_path, python(TRACKS), "plain"))
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout and "\r" not in result.stdout
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("line ")] == [f"line {n} of rank 0" for n in range(5)]
    assert lines[-1] == "loss: 0.05"
    assert not any(line.startswith("next:") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["status", "no-such-job"], 3),
        (["artifacts", "get", "no-such-artifact", "nowhere"], 3),
        (["cancel", "cli-done"], 6),
        (["logs", "cli-done", "-f"], 0),
        (["jobs", "--state", "sleeping"], 2),
    ],
)
def test_exit_codes_tell_what_happened(shared_yard, done, arguments, code):
    result = shared_yard.run(*arguments)
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_exits_as_its_job_does(shared_yard, tmp_path, client):
    assert shared_yard.run("run", job_file(tmp_path, ["sh", "-c", "exit 3"], "fails")).returncode == 1
    command = shared_yard.spawn("run", job_file(tmp_path, ["sleep", "600"], "cancelled", gracePeriod="1s"))
    wait_until(lambda: any(job.started_ns for job in client.list(name_contains="cancelled")), "the job to run")
    assert shared_yard.run("cancel", "cancelled").returncode == 0
    command.communicate(timeout=WAIT_S)
    assert command.returncode == 7


def test_a_wrong_file_creates_nothing_and_lists_all_problems(shared_yard, tmp_path, client):
    (tmp_path / "job.yaml").write_text(
        "apiVersion: trainyard.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: Wrong}\n"
        "spec:\n  comand: [true]\n  nodes: 0\n"
    )
    result = shared_yard.run("submit", tmp_path / "job.yaml")
    assert result.returncode == 2
    for text in ("job.yaml:3", "metadata.name", "job.yaml:5", "did you mean command", "job.yaml:6", "spec.nodes"):
        assert text in result.stderr
    assert not any(client.list(name_contains="rong"))


def test_a_foreign_token_is_exit_code_5_and_no_yard_is_4(shared_yard, make_home):
    shared_yard.environ["TRAINYARD_TOKEN"] = "foreign"
    try:
        assert shared_yard.run("jobs").returncode == 5
    finally:
        del shared_yard.environ["TRAINYARD_TOKEN"]
    nobody = make_home().run("jobs")
    assert nobody.returncode == 4
    assert "yard up" in nobody.stderr


def test_a_dry_run_shows_the_resolved_job_where_it_fits_and_its_place(shared_yard, tmp_path, client):
    result = shared_yard.run("submit", "--dry-run", job_file(tmp_path, ["true"], "imagined"))
    assert result.returncode == 0
    assert "gracePeriod: 30s" in result.stdout
    assert "would start at once" in result.stdout
    assert not any(client.list(name_contains="imagined"))


def test_a_rendered_job_can_be_submitted(shared_yard, tmp_path, client):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("print('packed')")
    rendered = shared_yard.run("render", job_file(folder, ["python", "train.py"], "rendered", code={"path": "."}))
    assert rendered.returncode == 0, rendered.stderr
    assert "path" not in read_yaml(rendered.stdout)["spec"]["code"]
    (tmp_path / "rendered.yaml").write_text(rendered.stdout)
    assert shared_yard.run("submit", tmp_path / "rendered.yaml").returncode == 0
    job = client.job("rendered")
    job.wait(WAIT_S)
    assert output(job) == ["packed"]


def test_a_key_submits_once(shared_yard, tmp_path, client):
    path = job_file(tmp_path, ["true"], "keyed")
    answers = [shared_yard.run("submit", path, "--key", "the-key", "-o", "json") for _ in range(2)]
    first, second = (json.loads(answer.stdout) for answer in answers)
    assert first["job"]["id"] == second["job"]["id"]
    assert (first["created"], second["created"]) == (True, False)
    assert len(list(client.list(name_contains="keyed"))) == 1


@pytest.mark.parametrize("command", ["jobs", "status", "events", "explain", "metrics", "artifacts", "version"])
def test_every_answer_is_there_for_people_and_for_programs(shared_yard, done, command):
    arguments = {"jobs": ["jobs"], "artifacts": ["artifacts", "list"], "version": ["version"]}.get(
        command, [command, done.id]
    )
    for form in ("table", "wide"):
        shown = shared_yard.run(*arguments, "-o", form)
        assert shown.returncode == 0 and shown.stdout.strip(), shown.stderr
    as_json, as_yaml = (shared_yard.run(*arguments, "-o", form).stdout for form in ("json", "yaml"))
    if command == "events":
        assert json.loads(as_json.splitlines()[0])["type"] == "Submitted"
    else:
        assert json.loads(as_json) == read_yaml(as_yaml)


def test_a_job_is_named_by_id_prefix_name_or_last(shared_yard, done, client):
    last = client.submit(document(["true"], "cli-last"))
    last.wait(WAIT_S)
    asked = {
        name: json.loads(shared_yard.run("status", name, "-o", "json").stdout)
        for name in (done.id, done.id[:-1], "cli-done", "@last")
    }
    found = {name: answer.get("id") or answer["job"]["id"] for name, answer in asked.items()}
    assert found == {done.id: done.id, done.id[:-1]: done.id, "cli-done": done.id, "@last": last.id}


def test_logs_are_chosen_by_rank_tail_and_text(shared_yard, done):
    def lines(*options):
        return shared_yard.run("logs", done.id, *options).stdout.splitlines()

    assert sorted(lines()) == sorted(f"[rank {r}] line {n} of rank {r}" for r in (0, 1) for n in range(5))
    assert lines("--rank", "1", "--tail", "2") == [f"[rank 1] line {n} of rank 1" for n in (3, 4)]
    assert sorted(lines("--search", "line 2")) == [f"[rank {r}] line 2 of rank {r}" for r in (0, 1)]


def test_logs_are_followed_to_the_end_of_the_job(shared_yard, held):
    job, open_gate = held
    follower = shared_yard.spawn("logs", "-f", job.id)
    assert follower.stdout.readline() == "waiting\n"
    open_gate()
    rest, _ = follower.communicate(timeout=WAIT_S)
    assert "through" in rest.splitlines()
    assert follower.returncode == 0


def test_metrics_are_plotted_and_given_as_points(shared_yard, done):
    plot = shared_yard.run("metrics", done.id, "loss")
    assert plot.returncode == 0 and "loss" in plot.stdout and len(plot.stdout.splitlines()) > 5
    ranks = json.loads(shared_yard.run("metrics", done.id, "loss", "-o", "json").stdout)
    assert [each["step"] for each in ranks] == [list(range(1, 21))] * 2
    assert ranks[0]["value"] == [1 / step for step in range(1, 21)]


def test_artifacts_are_put_listed_shown_and_fetched(shared_yard, tmp_path):
    (tmp_path / "file.txt").write_text("content")
    assert shared_yard.run("artifacts", "put", "cli-data", tmp_path / "file.txt", "--alias", "best").returncode == 0
    listed = json.loads(shared_yard.run("artifacts", "list", "cli-data", "-o", "json").stdout)
    assert [(each["name"], each["number"]) for each in listed] == [("cli-data", 1)]
    assert "file.txt" in shared_yard.run("artifacts", "show", "cli-data@best").stdout
    assert shared_yard.run("artifacts", "get", "cli-data@1", tmp_path / "back").returncode == 0
    assert (tmp_path / "back" / "file.txt").read_text() == "content"


def test_a_shell_runs_in_the_folder_and_environment_of_a_worker(shared_yard, held):
    job, _ = held
    result = shared_yard.run("shell", job.id, "--", "sh", "-c", "echo $COLOUR; pwd; exit 5")
    colour, folder = result.stdout.split()
    assert (colour, result.returncode) == ("green", 5)
    assert f"/attempts/{job.status().attempt_id}/node-0/work" in folder


def test_stacks_name_the_function_a_running_worker_is_in(shared_yard, held):
    job, _ = held
    result = shared_yard.run("stacks", job.id)
    if "Operation not permitted" in result.stdout + result.stderr:
        pytest.skip("this machine does not let one process look into another")
    assert "waiting_for_the_gate" in result.stdout


def test_describing_a_running_job_shows_its_processes(shared_yard, held):
    job, _ = held
    shown = shared_yard.run("status", job.id).stdout
    assert "RANK" in shown and "running" in shown


def test_two_runs_at_once_share_a_yard_that_ends_with_them(home, tmp_path):
    commands = [
        home.spawn("run", job_file(tmp_path, ["sh", "-c", f"echo out of {name}"], name)) for name in ("one", "two")
    ]
    for name, command in zip(("one", "two"), commands, strict=True):
        shown, _ = command.communicate(timeout=WAIT_S)
        assert command.returncode == 0, shown
        assert f"out of {name}" in shown
    home.assert_nothing_left()


def test_a_reader_may_close_the_pipe(shared_yard, client):
    job = client.submit(document(python("for n in range(3000): print('x' * 100)")))
    job.wait(WAIT_S)
    command = shared_yard.spawn("logs", job.id)
    command.stdout.readline()
    command.stdout.close()
    assert command.wait(PATIENCE_S) == 0
