"""What an operator does with a yard: look at its storage, check it, copy it, bring the copy to life.

Copying is for SQLite and a folder, so it is tested on the yard of one machine; PostgreSQL and S3 have their own tools.
"""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing

from trainyard.client import Client
from trainyard_protos.v1 import scheduler_pb2

from tests.conftest import wait_until
from tests.jobs import WAIT_S, document, output, python, running

TRAINS = """
    import os
    from trainyard import tracker
    tracker.params({"lr": 0.1})
    for step in range(1, 201):
        tracker.log({"loss": 1 / step, "nan": float("nan")}, step=step)
        print("step", step)
    os.mkdir("made")
    open("made/model", "wb").write(os.urandom(3_000_000))
"""
PLAIN = """
from trainyard import tracker
tracker.init(name="plain")
tracker.log({"loss": 1}, step=1)
tracker.finish()
"""
HELD = """
    import os, sys
    print("begun", flush=True)
    if not os.path.exists(sys.argv[1] + "/let"):
        open(sys.argv[1] + "/gate").read()
    print("through", flush=True)
"""


def state_of(client: Client, job_id: str):
    """Everything that a client can read of an ended job."""
    job = client.job(job_id)
    series = client.metrics(job_id, max_points=0)
    return {
        "job": job.status().SerializeToString(deterministic=True),
        "events": [event.SerializeToString(deterministic=True) for event in job.events()],
        "series": [each.SerializeToString(deterministic=True) for each in series],
        "lines": [line.SerializeToString(deterministic=True) for line in client.logs(job_id, ranks=[-1, 0])],
        "versions": [each.SerializeToString(deterministic=True) for each in client.versions(job=job_id)],
        "run": client.run(job_id).params,
    }


def test_a_backup_in_an_empty_home_is_the_same_yard(home, make_home, tmp_path):
    home.up()
    os.mkfifo(tmp_path / "gate")
    with home.client() as client:
        outputs = [{"path": "made", "artifact": "made"}]
        trained = client.submit(document(python(TRAINS), "trained", outputs=outputs))
        trained.wait(WAIT_S)
        retries = {"limit": 2, "backoff": "100ms"}
        held = client.submit(document(python(HELD, str(tmp_path)), "held", retries=retries))
        running(held)
        wait_until(lambda: "begun" in output(held), "the job to begin")
        copied = home.run("admin", "backup", str(tmp_path / "copy"))
        assert copied.returncode == 0, copied.stderr
        before = state_of(client, trained.id)
        client.download("made", tmp_path / "first")
    (tmp_path / "let").touch()
    (tmp_path / "gate").write_text("")
    home.down()

    restored = make_home()
    restored.folder.rmdir()
    (tmp_path / "copy").rename(restored.folder)
    restored.up()
    with restored.client() as client:
        assert state_of(client, trained.id) == before
        client.download("made", tmp_path / "second")
        assert (tmp_path / "second/model").read_bytes() == (tmp_path / "first/model").read_bytes()
        assert [each for each in client.verify() if each.finding is not None] == []
        copies = {each.service for each in client.all_events() if each.event.type == "BackupStarted"}
        assert copies == {"scheduler", "metrics", "artifacts"}
        found = client.job(held.id).wait(WAIT_S)
        assert found.state == scheduler_pb2.JOB_STATE_SUCCEEDED
        assert found.attempt == 2
    restored.down()
    restored.assert_nothing_left()


def test_what_is_left_of_jobs_that_a_restored_scheduler_does_not_know_is_removed(make_home):
    """And nothing else: neither the runs of plain scripts nor those of jobs that it knows."""
    home = make_home(TRAINYARD_SCHEDULER_ORPHAN_GRACE_S="0", TRAINYARD_LAUNCHER_RECONCILE_S="0.2")
    attempts = home.folder / "attempts"
    home.up()
    with home.client() as client:
        kept, lost = (client.submit(document(["true"], name)).wait(WAIT_S) for name in ("kept", "lost"))
        subprocess.run([sys.executable, "-c", PLAIN], env=home.environ, check=True)
        wait_until(lambda: len(list(client.runs())) == 3, "all runs to be stored")
        wait_until((attempts / lost.attempt_id / "over").exists, "the attempt to be closed")
    home.down()
    with closing(sqlite3.connect(home.folder / "scheduler.db")) as database, database:
        for table, column in (("attempts", "job_id"), ("jobs", "id")):
            database.execute(f"delete from {table} where {column} = ?", (lost.id,))
    home.up()
    with home.client() as client:
        wait_until(lambda: not list(client.runs(f'job = "{lost.id}"')), "the run to be removed")
        wait_until(lambda: not (attempts / lost.attempt_id).exists(), "the folder to be removed")
        assert sorted(run.job_id for run in client.runs()) == ["", kept.id]
        assert (attempts / kept.attempt_id).exists()
    home.down()


def test_usage_names_what_each_service_stores(shared_yard, client):
    client.submit(document(python("print('x')"), "used")).wait(WAIT_S)
    usage = {each.service: each for each in client.usage()}
    assert usage.keys() == {"scheduler", "launcher", "metrics", "artifacts"}
    databases = {
        service: [kind.bytes for kind in each.usage if kind.what == "database"] for service, each in usage.items()
    }
    assert databases.pop("launcher") == []
    assert all(sum(sizes) for sizes in databases.values())
    assert all(each.free_bytes for service, each in usage.items() if service != "artifacts")


def test_a_whole_yard_verifies_and_can_be_maintained(shared_yard, client):
    client.submit(document(python("print('x')"), "whole")).wait(WAIT_S)
    assert shared_yard.run("admin", "verify").stdout == "everything is as it was written\n"
    maintained = shared_yard.run("admin", "maintain", "-o", "json")
    assert maintained.returncode == 0, maintained.stderr
    assert '"service": "metrics"' in maintained.stdout
