"""Runs record which code they are made of, are found again, and are laid side by side."""

import json
import os
import subprocess

import pytest

from tests.jobs import WAIT_S, document

SCRIPT = """
from trainyard import tracker
tracker.params({"lr": %s})
tracker.log({"loss": %s}, step=3)
"""


def git(folder, *arguments):
    who = {f"GIT_{role}_{what}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    command = ["git", "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **who}, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A job in a repository with one commit and a remote; the yard does not get `secret.env`."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(SCRIPT % ("0.1", "2.0"))
    (folder / "secret.env").write_text("KEY=committed\n")
    (folder / ".yardignore").write_text("*.env\n")
    job = document(["python", "train.py"], "sourced", code={"path": "."})
    (folder / "job.json").write_text(json.dumps(job))
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    git(folder, "remote", "add", "origin", "https://me:pa55w0rd@example.org/project.git")
    return folder


@pytest.fixture(scope="module")
def runs(client, project):
    """The job as it was committed, and again with a change that was not."""
    git(project, "checkout", "--quiet", ".")
    committed = client.submit(project / "job.json")
    committed.wait(WAIT_S)
    (project / "train.py").write_text(SCRIPT % ("0.2", "1.0"))
    (project / "secret.env").write_text("KEY=changed\n")
    changed = client.submit(project / "job.json")
    changed.wait(WAIT_S)
    return committed, changed


def test_a_run_knows_its_commit_and_what_differs_from_it(client, project, runs):
    commit = git(project, "rev-parse", "HEAD")
    first, second = (client.run(job.id) for job in runs)
    expected = {"commit": commit, "branch": "main", "remote": "https://example.org/project.git", "dirty": False}
    assert first.context["git"] == expected
    assert client.diff(first) == ""
    diff = client.diff(second)
    assert '+tracker.params({"lr": 0.2})' in diff
    assert "secret" not in diff
    assert second.context["git"]["dirty"]
    assert "pa55w0rd" not in json.dumps(second.context)


def test_the_commit_and_the_diff_give_back_the_code_that_ran(client, project, runs, tmp_path):
    run = client.run(runs[1].id)
    git(tmp_path, "clone", "--quiet", str(project), "again")
    git(tmp_path / "again", "checkout", "--quiet", run.context["git"]["commit"])
    (tmp_path / "patch").write_text(client.diff(run))
    git(tmp_path / "again", "apply", str(tmp_path / "patch"))
    assert (tmp_path / "again" / "train.py").read_text() == SCRIPT % ("0.2", "1.0")


def test_runs_are_found_by_what_they_logged_and_were_made_with(client, runs):
    found = list(client.runs('name = "sourced" and metrics.loss < 1.5 and params.lr = 0.2', names=["loss"]))
    assert [(run.job_id, run.values, run.steps) for run in found] == [(runs[1].id, {"loss": 1.0}, {"loss": 3})]
    ordered = list(client.runs('name = "sourced"', order_by="metrics.loss"))
    assert [run.job_id for run in ordered] == [runs[1].id, runs[0].id]


def test_a_comparison_shows_what_differs_and_nothing_else(client, runs):
    rows = {f"{row.part}.{row.name}": row.values for row in client.compare([job.id for job in runs]).rows}
    assert rows["params.lr"] == (0.1, 0.2)
    assert rows["metrics.loss"] == (2.0, 1.0)
    assert rows["git.dirty"] == (False, True)
    assert rows["git.diff"][0] is None
    assert rows.keys() <= {
        "params.lr",
        "metrics.loss",
        "git.dirty",
        "git.diff",
        "code.digest",
        "code.files.train.py",
    }


def test_code_without_git_is_compared_by_its_content(client, shared_yard, tmp_path):
    (tmp_path / "train.py").write_text("print(1)\n")
    job = document(["python", "train.py"], "plain", code={"path": "."})
    (tmp_path / "job.json").write_text(json.dumps(job))
    jobs = []
    for text in ("print(1)\n", "print(1)\n", "print(2)\n"):
        (tmp_path / "train.py").write_text(text)
        jobs.append(client.submit(tmp_path / "job.json"))
        jobs[-1].wait(WAIT_S)
    first, again, changed = (job.id for job in jobs)
    assert [row for row in client.compare([first, again]).rows if row.part in ("code", "params")] == []
    assert [version.number for version in client.versions("plain-code")] == [2, 1]
    rows = {row.name for row in client.compare([first, changed]).rows if row.part == "code"}
    assert rows == {"digest", "files.train.py"}
    assert shared_yard.run("compare", first, changed, "--diff").stdout == "changed  train.py\n"


def test_the_command_compares_jobs_by_name_and_id(shared_yard, runs):
    ended = shared_yard.run("compare", runs[0].id, runs[1].id)
    assert ended.returncode == 0, ended.stderr
    assert '++tracker.params({"lr": 0.2})' in ended.stdout or "+tracker.params" in ended.stdout
    listed = shared_yard.run("runs", "list", 'name = "sourced"', "-m", "loss", "--order-by", "metrics.loss")
    assert [line.split()[-1] for line in listed.stdout.splitlines()[1:3]] == ["1", "2"]


def test_a_job_from_git_records_the_commit_it_resolved_to(client, project):
    job = client.submit(
        document(["python", "train.py"], "from-git", code={"git": {"url": str(project), "ref": "main"}})
    )
    job.wait(WAIT_S)
    context = client.run(job.id).context["git"]
    assert context["commit"] == git(project, "rev-parse", "main")
    assert (context["remote"], context["ref"], context["dirty"]) == (str(project), "main", False)


def test_the_diff_can_be_left_out(client, project, monkeypatch):
    monkeypatch.setenv("TRAINYARD_GIT_DIFF", "off")
    (project / "train.py").write_text(SCRIPT % ("0.3", "1.0"))
    job = client.submit(project / "job.json")
    job.wait(WAIT_S)
    run = client.run(job.id)
    assert run.context["git"]["dirty"]
    assert client.diff(run) == ""
