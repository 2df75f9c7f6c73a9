"""Redis, PostgreSQL, nginx and the active scheduler go and come back: training goes on, nothing is lost or doubled."""

import time

import pytest
from trainyard_protos.v1 import scheduler_pb2

from tests.conftest import SplitHome, wait_until
from tests.jobs import WAIT_S, document, output, python

OUTAGE_S = 20
TRAINING = """
    import os, pathlib, time
    from trainyard import tracker

    gate = pathlib.Path(os.environ["GATE"])
    step = 0
    print("begins", flush=True)
    while not gate.exists():
        step += 1
        tracker.log({"loss": 1 / step}, step=step)
        time.sleep(0.05)
    print("steps", step)
"""


@pytest.fixture(scope="module")
def mode():
    return "split"


@pytest.fixture(scope="module")
def yard_settings():
    return {
        "TRAINYARD_LAUNCHER_CAPACITY_CPU": "16",
        "TRAINYARD_LAUNCHER_RECONCILE_S": "1",
        "TRAINYARD_SCHEDULER_RECLAIM_AFTER_S": "2",
    }


class Training:
    """A job that logs steps until it is told to end."""

    def __init__(self, client, gate):
        self.gate = gate
        self.job = client.submit(document(python(TRAINING), env={"GATE": str(gate)}))
        wait_until(lambda: self.steps() > 0, "its first steps")

    def steps(self):
        return len(self.job.metrics("loss").get("loss", NO_POINTS).step)

    def goes_on(self):
        """Whether more steps arrive than there were."""
        before = self.steps()
        return wait_until(lambda: self.steps() > before, "further steps")

    def assert_whole(self):
        """Ends it: one attempt, and every step it says it made is stored once."""
        self.gate.touch()
        ended = self.job.wait(WAIT_S)
        assert ended.attempt == 1
        first, last = output(self.job)
        assert first == "begins"
        made = int(last.split()[1])
        assert list(self.job.metrics("loss")["loss"].step) == list(range(1, made + 1))


class NO_POINTS:
    step = ()


@pytest.fixture
def training(client, tmp_path):
    training = Training(client, tmp_path / "gate")
    yield training
    training.gate.touch()


def quick_jobs(client, count):
    return [client.submit(document(["true"])) for _ in range(count)]


def assert_each_ran_once(jobs):
    for job in jobs:
        assert job.wait(WAIT_S).attempt == 1
        assert [event.type for event in job.events()].count("Running") == 1


@pytest.mark.slow
def test_jobs_submitted_while_redis_is_stopped_run_once_when_it_is_back(shared_yard, client, training, redis_server):
    redis_server.stop()
    jobs = quick_jobs(client, 10)
    time.sleep(OUTAGE_S)
    assert {job.status().state for job in jobs} == {scheduler_pb2.JOB_STATE_STARTING}
    training.goes_on()
    redis_server.start()
    assert_each_ran_once(jobs)
    training.assert_whole()


def test_a_job_that_ends_while_redis_is_stopped_has_ended(client, training, redis_server):
    redis_server.stop()
    training.assert_whole()
    redis_server.start()
    assert_each_ran_once(quick_jobs(client, 1))


def test_jobs_whose_messages_redis_forgot_run_once(shared_yard, client, training, redis_server):
    launcher = shared_yard.split.services["launcher"]
    launcher.pause()
    jobs = quick_jobs(client, 10)
    redis_server.wipe()
    launcher.resume()
    assert_each_ran_once(jobs)
    training.assert_whole()


def test_what_a_removed_job_left_is_gone_though_redis_forgot_the_message(shared_yard, client, redis_server):
    job = client.submit(document(["true"], ttl="2s"))
    ended = job.wait(WAIT_S)
    launcher = shared_yard.split.services["launcher"]
    launcher.pause()
    wait_until(lambda: job.id not in [each.id for each in client.list()], "the job to be removed")
    redis_server.wipe()
    launcher.resume()
    folder = shared_yard.folder / "attempts" / ended.attempt_id
    wait_until(lambda: not folder.exists(), "its folder to be removed")
    wait_until(lambda: not list(client.runs(f'job = "{job.id}"')), "its run to be removed")


def test_a_redis_that_hangs_delays_jobs_and_loses_none(client, training, redis_server):
    redis_server.pause()
    jobs = quick_jobs(client, 3)
    training.goes_on()
    redis_server.resume()
    assert_each_ran_once(jobs)
    training.assert_whole()


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_training_goes_on_while_postgres_is_away(client, training, postgres_server, how):
    if how == "kill":
        postgres_server.kill()
        postgres_server.start()
    else:
        postgres_server.restart()
    assert_each_ran_once(quick_jobs(client, 3))
    training.goes_on()
    training.assert_whole()


def test_training_goes_on_when_nginx_is_restarted(shared_yard, client, training):
    shared_yard.split.nginx.kill()
    shared_yard.split.nginx.start()
    assert_each_ran_once(quick_jobs(client, 3))
    training.goes_on()
    training.assert_whole()


@pytest.fixture
def two_schedulers(make_yard_home):
    home = make_yard_home(schedulers=2, TRAINYARD_LAUNCHER_CAPACITY_CPU="16")
    assert isinstance(home, SplitHome)
    try:
        home.up()
        yield home
        home.down()
        home.assert_nothing_left()
    finally:
        home.sweep()


def active_and_stand_by(home):
    """The active one is the one whose port is open."""
    both = [home.split.services["scheduler"], home.split.services["scheduler-2"]]
    return sorted(both, key=lambda process: not process.ready())


def test_a_second_scheduler_takes_over_when_the_active_one_is_killed(two_schedulers, tmp_path):
    active, stand_by = active_and_stand_by(two_schedulers)
    assert not stand_by.ready()
    with two_schedulers.client() as client:
        training = Training(client, tmp_path / "gate")
        active.kill()
        stand_by.wait_ready()
        assert_each_ran_once(quick_jobs(client, 3))
        training.assert_whole()


def test_a_scheduler_that_hung_finds_itself_replaced_and_ends(two_schedulers, tmp_path):
    active, stand_by = active_and_stand_by(two_schedulers)
    with two_schedulers.client() as client:
        training = Training(client, tmp_path / "gate")
        active.pause()
        stand_by.wait_ready()
        active.resume()
        assert active.process.wait(WAIT_S) == 0
        assert_each_ran_once(quick_jobs(client, 3))
        training.assert_whole()
