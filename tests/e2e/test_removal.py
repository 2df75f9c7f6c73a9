"""Jobs and runs are removed as a user asks: what is said to become free does, and nothing that others need goes."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import wait_until
from tests.jobs import WAIT_S, document, python, running

TRAINS = """
    import os
    from pathlib import Path
    from trainyard import tracker
    folder = Path(os.environ["TRAINYARD_CHECKPOINT_DIR"])
    for step in range(1, 4):
        tracker.log({"loss": 1 / step}, step=step)
        print("step", step, "x" * 2000)
        Path("draft").write_bytes(os.urandom(1_500_000))
        Path("draft").rename(folder / f"step-{step}.bin")
    Path("made").write_bytes(os.urandom(1_000_000))
    Path("left").write_bytes(os.urandom(2_000_000))
"""
PLAIN = """
from trainyard import tracker
tracker.init(name="{name}")
tracker.log({{"loss": 1}}, step=1)
tracker.finish()
"""


@pytest.fixture(scope="module")
def mode():
    """On the yard of one machine, whose disk can be looked at."""
    return "embedded"


@pytest.fixture(scope="module")
def yard_settings():
    """Chunks are kept for an hour after their last use, for uploads that need them again: here, not at all."""
    return {"TRAINYARD_ARTIFACTS_CHUNK_GRACE_S": "0.001", "TRAINYARD_LAUNCHER_CAPACITY_CPU": "16"}


def trained(client, name):
    checkpoints = {"path": "checkpoints", "pattern": "step-{step}.bin"}
    outputs = [{"path": "made", "artifact": f"made-{name}"}]
    job = client.submit(document(python(TRAINS), name, checkpoints=checkpoints, outputs=outputs))
    job.wait(WAIT_S)
    return job


def on_disk(folder):
    """As `du` says."""
    said = subprocess.run(["du", "-s", "--block-size=1", folder], capture_output=True, text=True, check=True)
    return int(said.stdout.split()[0])


def attempt_of(job):
    return job.status().attempt_id


def copies_gone(home, attempt):
    """Waits until the launcher has removed copies of what is stored, which it does after the job's end."""
    folder = home.folder / "attempts" / attempt
    wait_until(lambda: (folder / "over").exists() and not list(folder.glob("node-*/copies.jsonl")), "copies to go")
    return folder


def test_what_a_removal_is_said_to_free_becomes_free(shared_yard, tmp_path):
    home = shared_yard
    with home.client() as client:
        job, other = trained(client, "removed"), trained(client, "stays")
        attempt, remains = attempt_of(job), copies_gone(home, attempt_of(other))
        folder, run = copies_gone(home, attempt), home.folder / "runs" / attempt
        client.set_alias(f"checkpoints-{job.id}@1", "mine")

        refused = home.run("jobs", "rm", "removed")
        assert (refused.returncode, "no terminal" in refused.stderr, "--yes" in refused.stderr) == (6, True, True)
        shown = home.run("jobs", "rm", "removed", "--dry-run", "-o", "json")
        [said] = json.loads(shown.stdout)
        parts = {part["what"]: part["bytes"] for part in said["frees"]}
        assert parts["attempt folders"] == on_disk(folder) >= 2_000_000
        assert sum(parts.values()) - parts["attempt folders"] - parts["checkpoints"] == on_disk(run)
        assert parts["checkpoints"] >= 3_000_000
        assert {(kept["name"].partition("-")[0], kept["name"].partition("@")[2]) for kept in said["keeps"]} == {
            ("checkpoints", "1"),
            ("made", "1"),
        }
        packs = on_disk(home.folder / "packs")

        done = home.run("jobs", "rm", "removed", "--yes")
        assert done.returncode == 0, done.stderr
        assert "stays: made-removed@1: an output of the job" in done.stdout
        assert "has the alias mine" in done.stdout
        wait_until(lambda: not folder.exists() and not run.exists(), "folders to go")
        wait_until(lambda: len(list(client.versions(job=job.id))) == 2, "checkpoints to go")
        client.maintain()
        freed = packs - on_disk(home.folder / "packs")
        # A pack has a table of its chunks and ends at a block of the disk.
        assert abs(freed - parts["checkpoints"]) < 64 * 1024
        assert remains.exists()
        client.download("made-removed", tmp_path / "back")
        assert home.run("artifacts", "rm", "made-removed").returncode == 6
        assert home.run("jobs", "rm", job.id, "--yes").returncode in (0, 3)
        assert [
            each.event.actor.partition("/")[0] for each in client.all_events() if each.event.type == "JobDeleted"
        ] == ["user"]


def test_a_yard_that_is_killed_in_a_removal_completes_it(shared_yard):
    home = shared_yard
    with home.client() as client:
        job = trained(client, "killed")
        attempt = attempt_of(job)
        copies_gone(home, attempt)
        client.remove_job(job.id)
        home.kill()
    home.up()
    with home.client() as client:
        wait_until(lambda: not (home.folder / "attempts" / attempt).exists(), "the folder to go")
        wait_until(lambda: not list(client.runs(f'job = "{job.id}"')), "its run to go")
        wait_until(lambda: [each.kind for each in client.versions(job=job.id)] == ["output"], "checkpoints to go")
        assert not [each for each in client.list() if each.id == job.id]


def test_what_lives_or_is_ambiguous_is_not_removed_and_neither_is_what_was_named_with_it(shared_yard, tmp_path):
    home = shared_yard
    os.mkfifo(tmp_path / "gate")
    with home.client() as client:
        ended = client.submit(document(["true"], "ended"))
        twice = [client.submit(document(["true"], "twice")) for _ in range(2)]
        live = client.submit(document(["cat", str(tmp_path / "gate")], "live"))
        for job in (ended, *twice):
            job.wait(WAIT_S)
        running(live)
        for name, words in (("live", "yard cancel live#1"), ("twice", "twice#2")):
            refused = home.run("jobs", "rm", "ended", name, "--yes")
            assert (refused.returncode, words in refused.stderr) == (6, True)
        assert {ended.id, live.id, *(each.id for each in twice)} <= {each.id for each in client.list()}
        assert home.run("jobs", "rm", "ended", "twice#1", "twice#1", "-y").returncode == 0
        assert {each.id for each in client.list()}.isdisjoint({ended.id, twice[0].id})
        assert home.run("jobs", "rm", "ended", "-y").returncode == 3
        assert home.run("runs", "rm", "live", "-y").returncode == 6
        live.cancel()
        live.wait(WAIT_S, check=False)


def test_checkpoints_that_a_waiting_job_names_as_inputs_stay(shared_yard):
    home = shared_yard
    with home.client() as client:
        job = trained(client, "resumed")
        newest = client.artifact(f"checkpoints-{job.id}")
        inputs = [{"artifact": newest.id, "path": "start"}]
        never = client.submit(document(["true"], "waits", inputs=inputs, resources={"cpu": 4000, "memory": "1Mi"}))
        removal = client.remove_job(job.id)
        assert (newest.name + f"@{newest.number}", "an input of a job that has not ended") in [
            (kept.name, kept.why) for kept in removal.keeps
        ]
        wait_until(lambda: len(list(client.versions(job=job.id, kind="checkpoint"))) == 1, "the others to go")
        assert client.artifact(newest.id).id == newest.id
        never.cancel()


def test_runs_are_removed_with_all_that_is_stored_of_them(shared_yard):
    home = shared_yard
    with home.client() as client:
        for name in ("first", "second", "second"):
            subprocess.run([sys.executable, "-c", PLAIN.format(name=name)], env=home.environ, check=True)
        plain = 'name in ("first", "second")'
        wait_until(lambda: len(list(client.runs(plain))) == 3, "the runs to be delivered")
        job = trained(client, "kept")
        [first] = client.runs('name = "first"')
        wait_until(lambda: client.run_removal("first").bytes > 0, "its writer to end")
        refused = home.run("runs", "rm", "first")
        assert (refused.returncode, "no terminal" in refused.stderr) == (6, True)
        assert home.run("runs", "rm", "second", "-y").returncode == 6
        shown = home.run("runs", "rm", "first", "--dry-run")
        assert (shown.returncode, "run first" in shown.stdout) == (0, True)
        assert home.run("runs", "rm", "first", job.name, "-y").returncode == 0
        assert {run.name for run in client.runs(plain)} == {"second"}
        assert not (home.folder / "runs" / first.id).exists()
        assert not (home.folder / "runs" / attempt_of(job)).exists()
        assert home.run("runs", "rm", "first", "-y").returncode == 3
        events = [event for event in client.admin_events("metrics") if event.type == "RunsDeleted"]
        assert [(event.kind, event.object_name) for event in events][-2:] == [("Run", "first"), ("Job", "kept")]


def test_a_name_of_a_job_and_of_the_run_of_a_plain_script_selects_neither(shared_yard):
    """The start of a job's id selects the job too: a run may be called that."""
    home = shared_yard
    with home.client() as client:
        job = client.submit(document(["true"], "both"))
        job.wait(WAIT_S)
        start = job.id[:-1]
        for name in ("both", start):
            subprocess.run([sys.executable, "-c", PLAIN.format(name=name)], env=home.environ, check=True)
        plain = f'name in ("both", "{start}")'
        wait_until(lambda: len(list(client.runs(plain))) == 3, "the runs to be delivered")
        for name in ("both", start):
            refused = home.run("runs", "rm", name, "-y")
            assert (refused.returncode, "both#1" in refused.stderr) == (6, True)
        assert home.run("runs", "rm", "both#1", "-y").returncode == 0
        assert sorted(run.name for run in client.runs(plain)) == sorted(["both", start])


def test_usage_counts_the_folders_of_attempts_by_job_also_without_a_yard(shared_yard):
    """As `du` does: files with two names once, and nothing that a link leads to."""
    home = shared_yard
    with home.client() as client:
        job = trained(client, "measured")
        folder = copies_gone(home, attempt_of(job))
        work = folder / "node-0/work"
        os.link(work / "left", work / "again")
        (work / "out").symlink_to("/usr")
    for up in (True, False):
        if not up:
            home.down()
        said = json.loads(home.run("admin", "usage", "-o", "json").stdout)
        [launcher] = [each for each in said if each["service"] == "launcher"]
        total, *jobs = launcher["usage"]
        [of_job] = [each for each in jobs if each["jobName"] == "measured"]
        assert int(of_job["bytes"]) == on_disk(folder)
        assert int(total["bytes"]) == sum(int(each["bytes"]) for each in jobs)
        assert (int(of_job["count"]), launcher.get("unread", [])) == (1, [])
    home.up()
