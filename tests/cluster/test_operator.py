"""Resources of a real cluster become jobs of a real yard, and say what becomes of them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from trainyard import errors
from trainyard.client import Client, JobHandle
from trainyard_operator.resource import FINALIZER

from scripts.testbed.cluster import locks
from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.cluster.processes import Failed
from scripts.testbed.patience import PATIENCE_S
from tests.cluster.hooks import run_hook
from tests.cluster.resources import KIND, OperatorProcess, Resources, in_a_namespace
from tests.conftest import REPOSITORY, YardHome, wait_until
from tests.jobs import document, python

LOGS_FOR_EVER = """
import time
from trainyard import tracker
step = 0
while True:
    tracker.log({"val/accuracy": step / (step + 10)}, step=step)
    step += 1
    time.sleep(0.1)
"""
BEST = {"path": "c", "pattern": "s-{step}.pt", "keep": {"best": {"metric": "val/accuracy", "mode": "max"}}}
FOR_EVER = ["sleep", "1000"]


@pytest.fixture(scope="module")
def resources(cluster: Cluster) -> Iterator[Resources]:
    with locks.lasting(cluster.layout, in_a_namespace(cluster)) as found:
        yield found


@pytest.fixture(scope="module")
def _operator(
    cluster: Cluster, resources: Resources, shared_yard: YardHome, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    folder = tmp_path_factory.mktemp("operator")
    settings = {"PROGRESS_INTERVAL_S": "1", "RETRY_S": "0.1"}
    process = OperatorProcess(cluster, resources.namespace, shared_yard.folder, folder, settings)
    with locks.lasting(cluster.layout, operating(process, resources)):
        yield process


@contextmanager
def operating(operator: OperatorProcess, resources: Resources) -> Iterator[None]:
    """An operator that runs, until the last of its resources is gone."""
    operator.start()
    try:
        yield
        operator.start()
        for name in resources.names():  # nobody lets go of them afterwards
            resources.delete(name)
    finally:
        operator.stop()


@pytest.fixture
def operator(_operator: OperatorProcess) -> Iterator[OperatorProcess]:
    """The operator of the module; a test that ends it gets it back afterwards."""
    _operator.start()
    yield _operator
    _operator.start()


def jobs_of(client: Client, name: str) -> list[Any]:
    return list(client.list(name_contains=name))


def test_a_resource_becomes_a_job_and_says_how_it_ended(
    operator: OperatorProcess, resources: Resources, client: Client
) -> None:
    resources.apply(document(["true"], "short", labels={"team": "vision"}))
    resources.wait("short", "Succeeded")
    status = resources.status("short")
    (job,) = jobs_of(client, "short")
    assert (status["jobId"], status["phase"], status["reason"]) == (job.id, "Succeeded", "Completed")
    assert status["exit"]["exitCode"] == 0
    assert job.labels == {"team": "vision"}
    told = ("Submitted", "Running", "Succeeded")
    wait_until(lambda: all(word in resources.kubectl("describe", KIND, "short") for word in told), f"events {told}")


def test_a_failure_is_told_with_its_reason_and_last_words(operator: OperatorProcess, resources: Resources) -> None:
    resources.apply(document(python("raise SystemExit('out of luck')"), "unlucky"))
    resources.wait("unlucky", "Failed")
    status = resources.status("unlucky")
    assert (status["phase"], status["reason"]) == ("Failed", "WorkerFailed")
    assert status["exit"]["lastLines"] == ["out of luck"]


GUIDE = (REPOSITORY / "docs" / "guides" / "kubectl.md").read_text()


def succeeds(resources: Resources, command: str) -> bool:
    """Whether a kubectl command of the guide does, as it is written there."""
    try:
        resources.kubectl(*shlex.split(command, comments=True)[1:])
    except Failed:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "command", "outcomes"), [("well", "true", [True, True]), ("badly", "false", [True, False])]
)
def test_the_guides_commands_to_wait_for_a_job_end_when_it_fails_too(
    operator: OperatorProcess, resources: Resources, name: str, command: str, outcomes: list[bool]
) -> None:
    resources.apply(document([command], name))
    commands = re.findall(r"^kubectl wait .*", GUIDE, re.MULTILINE)
    written = [each.replace("digits", name).replace("1h", f"{int(PATIENCE_S)}s") for each in commands]
    assert [succeeds(resources, each) for each in written] == outcomes


def test_progress_and_the_best_value_are_shown_and_deleting_ends_the_job(
    operator: OperatorProcess, resources: Resources, client: Client, shared_yard: YardHome
) -> None:
    resources.apply(document(python(LOGS_FOR_EVER), "learner", checkpoints=BEST, gracePeriod="1s"))
    status = resources.until("learner", lambda said: said.get("best") and said.get("step"), "to show its best value")
    assert status["best"].startswith("val/accuracy=0.")
    assert status["progress"] == str(status["step"])
    resources.delete("learner")
    (job,) = jobs_of(client, "learner")
    assert client.job(job.id).wait(check=False).reason == "Cancelled"
    assert shared_yard.workers("tracker.log") == []


def test_a_spec_that_the_yard_refuses_names_its_field_and_runs_once_it_is_right(
    operator: OperatorProcess, resources: Resources
) -> None:
    wrong = {"retries": {"rules": [{"logPattern": "(?=x)", "action": "fail"}]}}
    resources.apply(document(["true"], "mended", **wrong))
    resources.wait("mended", "Finished")
    status = resources.status("mended")
    (accepted,) = [each for each in status["conditions"] if each["type"] == "Accepted"]
    assert (status["phase"], accepted["status"], accepted["reason"]) == ("Refused", "False", "InvalidSpec")
    assert "spec.retries.rules[0].logPattern: not a regular expression of RE2" in accepted["message"]
    resources.apply(document(["true"], "mended"))
    resources.wait("mended", "Succeeded")


def test_what_users_of_the_yard_do_to_a_job_is_mirrored(
    operator: OperatorProcess, resources: Resources, client: Client
) -> None:
    resources.apply(document(FOR_EVER, "shared", gracePeriod="1s"))
    resources.wait("shared", "Running")
    job = client.job(resources.status("shared")["jobId"])
    job.cancel("not now")
    resources.until("shared", lambda said: said.get("phase") == "Cancelled", "to be cancelled")
    client.job(job.id).retry()
    status = resources.until("shared", lambda said: said.get("phase") == "Running", "to run again")
    assert status["attempt"] == 2
    resources.delete("shared")


def test_nothing_is_lost_while_the_operator_is_down(
    operator: OperatorProcess, resources: Resources, client: Client
) -> None:
    for name in ("ends", "deleted"):
        resources.apply(document(FOR_EVER, name, gracePeriod="1s"))
        resources.wait(name, "Running")
    operator.kill()
    client.job(resources.status("ends")["jobId"]).cancel()
    client.job(resources.status("ends")["jobId"]).wait(check=False)
    deleted = resources.status("deleted")["jobId"]
    resources.delete("deleted", "--wait=false")
    resources.apply(document(["true"], "new"))
    operator.start()
    resources.until("ends", lambda said: said.get("phase") == "Cancelled", "to say its end")
    resources.wait("new", "Succeeded")
    wait_until(lambda: "deleted" not in resources.names(), "the deleted resource to go")
    assert client.job(deleted).wait(check=False).reason == "Cancelled"
    wait_until(lambda: "Cancelled" in resources.kubectl("describe", KIND, "ends"), "the event that was missed")


def test_a_job_whose_submission_was_never_noted_is_found_again(
    operator: OperatorProcess, resources: Resources, client: Client
) -> None:
    operator.kill()
    found = document(["true"], "found")
    uid = resources.apply(found)
    job = client.submit(found, idempotency_key=uid)
    operator.start()
    resources.wait("found", "Succeeded")
    assert resources.status("found")["jobId"] == job.id
    assert len(jobs_of(client, "found")) == 1


def test_a_job_whose_submission_was_never_noted_is_cancelled_with_its_resource(
    operator: OperatorProcess, resources: Resources, client: Client
) -> None:
    operator.kill()
    orphan = document(FOR_EVER, "orphan", gracePeriod="1s")
    uid = resources.apply(orphan)
    resources.kubectl("patch", KIND, "orphan", "--type=merge", f"--patch={json.dumps(HELD)}")
    job = client.submit(orphan, idempotency_key=uid)
    resources.delete("orphan", "--wait=false")
    operator.start()
    wait_until(lambda: "orphan" not in resources.names(), "the resource to go")
    assert job.wait(check=False).reason == "Cancelled"


HELD = {"metadata": {"finalizers": [FINALIZER]}}


def test_a_resource_whose_job_the_yard_has_forgotten_can_be_deleted(
    operator: OperatorProcess, resources: Resources, client: Client
) -> None:
    resources.apply(document(["true"], "forgotten", ttl="1ms"))
    job_id = resources.until("forgotten", lambda said: said.get("jobId"), "to have a job")["jobId"]

    def forgotten() -> bool:
        try:
            client.job(job_id)
        except errors.NotFound:
            return True
        return False

    wait_until(forgotten, "the job to be forgotten")
    resources.delete("forgotten")


def test_a_yard_that_is_away_is_waited_for(
    operator: OperatorProcess, resources: Resources, shared_yard: YardHome
) -> None:
    shared_yard.kill()
    resources.apply(document(["true"], "patient"))
    shared_yard.up()
    resources.wait("patient", "Succeeded")


def test_a_resource_says_that_its_operator_was_uninstalled_until_there_is_one_again(
    operator: OperatorProcess, resources: Resources, cluster: Cluster
) -> None:
    resources.apply(document(["true"], "over"))
    resources.apply(document(FOR_EVER, "abandoned", gracePeriod="1s"))
    resources.wait("over", "Succeeded")
    resources.wait("abandoned", "Running")
    operator.stop()
    namespace = resources.namespace
    place = {"RELEASE": "yard", "NAMESPACE": namespace, "JOBS_NAMESPACE": namespace, "LAUNCHER": "trainyard"}
    done = run_hook(cluster, "remove", OPERATOR="true", OPERATOR_NAMESPACES=namespace, **place)
    assert done.returncode == 0, done.stderr
    status = resources.status("abandoned")
    assert (status["phase"], status["reason"]) == ("Unmanaged", "OperatorUninstalled")
    assert "'trainyard' was uninstalled" in status["message"]
    conditions = {each["type"]: each["status"] for each in status["conditions"]}
    assert conditions == {
        "Accepted": "True", "Running": "False", "Finished": "True", "Succeeded": "False", "Failed": "False",
    }  # fmt: skip
    assert resources.status("over")["phase"] == "Succeeded"
    operator.start()
    status = resources.until("abandoned", lambda said: said.get("phase") == "Running", "to be mirrored again")
    assert "reason" not in status
    resources.delete("abandoned")


COUNTS = """
import time
from trainyard import tracker
step = 0
while True:
    tracker.log({"n": step}, step=step)
    step += 1
    time.sleep(0.1)
"""


@contextmanager
def own_operator(
    cluster: Cluster, yard: YardHome, folder: Path, **settings: str
) -> Iterator[tuple[OperatorProcess, Resources]]:
    """A namespace with an operator of its own, which does not run yet."""
    with in_a_namespace(cluster) as found:
        operator = OperatorProcess(cluster, found.namespace, yard.folder, folder, settings)
        try:
            yield operator, found
        finally:
            operator.start()
            for each in found.names():  # nobody lets go of them afterwards
                found.delete(each)
            operator.stop()


def counting(resources: Resources, client: Client, name: str) -> JobHandle:
    """The job of a resource that no operator has seen; it runs and gets on."""
    wanted = document(python(COUNTS), name, gracePeriod="1s")
    job = client.submit(wanted, idempotency_key=resources.apply(wanted))
    wait_until_at(job, 1)
    return job


def wait_until_at(job: JobHandle, step: int) -> None:
    """Returns when the yard knows that the job is so far."""
    assert any(each.progress.step >= step for each in job.follow()), "it ended before"


def test_progress_is_written_once_in_an_interval_and_a_state_at_once_with_the_last_of_it(
    cluster: Cluster, shared_yard: YardHome, client: Client, tmp_path: Path
) -> None:
    with own_operator(cluster, shared_yard, tmp_path, PROGRESS_INTERVAL_S="3600") as (operator, found):
        job = counting(found, client, "counts")
        operator.start()
        shown = found.until("counts", lambda said: said.get("step"), "to show its progress")["step"]
        wait_until_at(job, shown + 10)
        assert found.status("counts")["step"] == shown
        job.cancel()
        status = found.until("counts", lambda said: said.get("phase") == "Cancelled", "to be cancelled")
        assert status["step"] >= shown + 10
        assert status["progress"] == str(status["step"])


@pytest.mark.exhaustive
def test_progress_of_all_resources_together_has_a_cap_and_states_have_none(
    cluster: Cluster, shared_yard: YardHome, client: Client, tmp_path: Path
) -> None:
    once_an_hour = {"PROGRESS_INTERVAL_S": "0.1", "PROGRESS_PER_S": str(1 / 3600)}
    with own_operator(cluster, shared_yard, tmp_path, **once_an_hour) as (operator, found):
        jobs = {name: counting(found, client, name) for name in ("one", "other")}
        operator.start()
        wait_until(lambda: any(found.status(name).get("step") for name in jobs), "one of them to show its progress")
        before = {name: found.status(name).get("step") for name in jobs}
        for name, job in jobs.items():
            wait_until_at(job, (before[name] or 0) + 10)
        assert sorted(map(bool, before.values())) == [False, True]
        assert {name: found.status(name).get("step") for name in jobs} == before
        for name, job in jobs.items():
            job.cancel()
            found.until(name, lambda said: said.get("phase") == "Cancelled", "to be cancelled")


@pytest.mark.exhaustive
def test_of_two_operators_that_watch_the_same_resources_each_is_submitted_by_one(
    cluster: Cluster, shared_yard: YardHome, yard: YardHome, client: Client, tmp_path: Path
) -> None:
    names = [f"either-{number}" for number in range(10)]
    with (
        own_operator(cluster, shared_yard, tmp_path / "one", IDENTITY="one") as (one, found),
        yard.client() as others,
    ):
        other = OperatorProcess(cluster, found.namespace, yard.folder, tmp_path / "other", {"IDENTITY": "other"})
        one.start()
        other.start()
        try:
            for name in names:
                found.apply(document(["true"], name))
            for name in names:
                found.wait(name, "Succeeded")
            jobs = {job.name: job.id for each in (client, others) for job in jobs_of(each, "either-")}
            assert sum(len(jobs_of(each, "either-")) for each in (client, others)) == len(names)
            assert {name: found.status(name)["jobId"] for name in names} == jobs
            for name in names:
                found.delete(name)
        finally:
            other.start()
            other.stop()
