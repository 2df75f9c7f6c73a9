"""Who starts when, who waits and why, and who gets which device."""

import os

import pytest
from trainyard import errors
from trainyard_protos.v1 import scheduler_pb2

from tests.conftest import wait_until
from tests.jobs import WAIT_S, document, output, python

WHOLE_MACHINE = {"cpu": 16, "memory": "64Mi"}


@pytest.fixture(scope="module")
def yard_settings():
    return {"TRAINYARD_LAUNCHER_CAPACITY_CPU": "16", "TRAINYARD_LAUNCHER_CAPACITY_GPU": "4"}


@pytest.fixture
def gate(client, tmp_path):
    """A job that holds the whole machine until it is opened."""
    held = Gate(client, tmp_path / "gate")
    yield held
    held.open()
    held.job.wait(WAIT_S)


class Gate:
    """A running job that ends when told to."""

    def __init__(self, client, path, **spec):
        os.mkfifo(path)
        self._path = path
        self._opened = False
        self.job = client.submit(document(["cat", str(path)], "gate", **({"resources": WHOLE_MACHINE} | spec)))
        wait_until(lambda: self.job.status().state == scheduler_pb2.JOB_STATE_RUNNING, "the gate")

    def open(self):
        if not self._opened:
            self._opened = True
            self._path.write_text("")


def submit(client, name, **spec):
    return client.submit(document(["true"], name, **spec))


def test_what_can_never_fit_is_told_from_what_has_to_wait(client, gate):
    never = submit(client, "never", resources={"cpu": 17, "memory": "64Mi"})
    waiting = submit(client, "waiting", resources=WHOLE_MACHINE)
    behind = submit(client, "behind")
    pending = {job.name: job.status().pending for job in (never, waiting, behind)}
    assert {name: each.reason for name, each in pending.items()} == {
        "never": "NeverFits",
        "waiting": "WaitingForCapacity",
        "behind": "BehindOthers",
    }
    assert [each.never_fits for each in pending.values()] == [True, False, False]
    assert behind.explain().position == 2
    assert list(behind.explain().ahead) == [waiting.id]
    assert "17" in never.explain().summary
    assert never.explain().total.cpu == 16
    gate.open()
    waiting.wait(WAIT_S)
    behind.wait(WAIT_S)
    assert never.status().pending.never_fits
    never.cancel()


def test_higher_priority_starts_first_then_the_older_one(client, gate):
    jobs = [
        submit(client, name, priority=priority, resources=WHOLE_MACHINE)
        for name, priority in [("low", 10), ("old", 50), ("new", 50), ("high", 90)]
    ]
    gate.open()
    for job in jobs:
        job.wait(WAIT_S)
    order = sorted((job.status() for job in jobs), key=lambda job: job.started_ns)
    assert [job.name for job in order] == ["high", "old", "new", "low"]


def test_a_plan_tells_the_place_in_the_queue_and_creates_nothing(client, gate):
    before = [job.id for job in client.list()]
    plan = client.plan(document(["true"], "planned"))
    assert (plan.position, plan.pending.reason) == (1, "WaitingForCapacity")
    assert len(plan.placements) == 1
    assert "workersPerNode: 1" in plan.resolved
    assert [job.id for job in client.list()] == before


def test_a_queued_job_that_is_cancelled_never_runs(client, gate):
    job = submit(client, "unwanted")
    job.cancel()
    ended = job.wait(WAIT_S, check=False)
    assert (ended.reason, ended.attempt) == ("Cancelled", 0)
    with pytest.raises(errors.JobCancelled):
        job.wait(WAIT_S)


def test_a_cancel_that_was_accepted_can_be_repeated_until_the_end(client):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready'); time.sleep(600)"
    job = client.submit(document(python(code), gracePeriod="500ms"))
    wait_until(lambda: "ready" in output(job), "the worker")
    assert job.cancel().state == scheduler_pb2.JOB_STATE_STOPPING
    assert job.cancel().state == scheduler_pb2.JOB_STATE_STOPPING
    ended = job.wait(WAIT_S, check=False)
    assert (ended.reason, ended.exit.reason) == ("Cancelled", "Stopped")


def test_an_ended_job_cannot_be_cancelled_and_a_succeeded_one_not_retried(client):
    job = submit(client, "over")
    job.wait(WAIT_S)
    for call in (job.cancel, job.retry):
        with pytest.raises(errors.Conflict) as refused:
            call()
        assert "succeeded" in refused.value.message


def test_devices_are_handed_out_to_one_worker_each(client):
    code = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(600)"
    two = {"resources": {"cpu": "100m", "memory": "64Mi", "gpu": 1}, "workersPerNode": 2, "runtime": "torchrun"}
    jobs = [client.submit(document(python(code), gracePeriod="1s", **two)) for _ in range(2)]
    third = submit(client, "third", resources={"gpu": 1})
    for job in jobs:
        wait_until(lambda job=job: len(output(job)) == 2, "the devices of both workers")
    assert third.status().pending.reason == "WaitingForCapacity"
    seen = [[set(line.split(",")) for line in output(job)] for job in jobs]
    assert all(first == second for first, second in seen), "workers of one node see its devices, and choose by rank"
    assert sorted(seen[0][0] | seen[1][0]) == ["0", "1", "2", "3"]
    jobs[0].cancel()
    third.wait(WAIT_S)
    jobs[1].cancel()
    for job in jobs:
        job.wait(WAIT_S, check=False)


def test_a_worker_without_devices_sees_none(client):
    job = client.submit(document(python("import os; print(repr(os.environ.get('CUDA_VISIBLE_DEVICES')))")))
    job.wait(WAIT_S)
    assert output(job) == ["''"]


def test_a_queue_is_kept_and_found(client):
    job = submit(client, "queued-elsewhere", queue="nightly")
    job.wait(WAIT_S)
    assert [each.id for each in client.list(queue="nightly")] == [job.id]
