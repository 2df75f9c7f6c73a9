"""A search whose trials are jobs of a yard."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import optuna
import pytest
from trainkit.errors import InvalidSetup
from trainkit.search import Choice, Jobs, Search
from trainyard_protos.v1 import scheduler_pb2

from tests.conftest import wait_until
from tests.jobs import document, python, running

TRAIN = """
import pathlib, sys, time
from trainyard import tracker

value, folder = float(sys.argv[1]), pathlib.Path(sys.argv[2])
(folder / sys.argv[1]).touch()
while not (folder / "go").exists() and len(list(folder.iterdir())) < 2:
    time.sleep(0.05)
for step in (1, 2):
    tracker.log({"val/loss": value / step}, step=step)
if value > 100:
    time.sleep(3600)
sys.exit(value < 0)
"""


@pytest.fixture(scope="module")
def mode():
    """The client is the same for both modes."""
    return "embedded"


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What trials differ in."""

    value: float = 1.0


@pytest.fixture
def gate(tmp_path):
    """A folder in which jobs wait for each other, or for a file `go`."""
    (tmp_path / "gate").mkdir()
    return tmp_path / "gate"


@pytest.fixture
def search(tmp_path, gate):
    """Makes a search over given values, each tried once, in their order."""

    def make(yard, *values, **settings):
        def job(task):
            labels = {"search": tmp_path.name}
            command = python(TRAIN, str(task.config.value), str(gate))
            return document(command, f"trial-{task.number}", labels=labels)

        sampler = optuna.samplers.GridSampler({"value": values}, seed=0)
        runner = Jobs(yard, job, every_s=0.2)
        return Search(
            config=Settings(),
            space={"value": Choice(values)},
            run=runner,
            **{"folder": tmp_path / "study", "sampler": sampler, "pruner": None, **settings},
        )

    return make


def states(yard, name):
    return {job.name: job.state for job in yard.list(labels={"search": name})}


def test_two_trials_run_at_once_and_the_best_is_found(client, search, tmp_path):
    result = search(client, 3.0, 2.0).optimize(2, workers=2)  # each job waits until both run

    assert (result.value, result.config) == (1.0, Settings(value=2.0))
    assert sorted(trial.value for trial in result.trials) == [1.0, 1.5]
    assert set(states(client, tmp_path.name).values()) == {scheduler_pb2.JOB_STATE_SUCCEEDED}
    assert not list(tmp_path.glob("study/trial-*/job"))


def test_a_failed_job_is_a_failed_trial_and_one_without_the_metric_too(client, search, gate, tmp_path):
    (gate / "go").touch()
    result = search(client, -1.0, 4.0).optimize(2)

    assert sorted((trial.parameters["value"], trial.state) for trial in result.trials) == [
        (-1.0, "failed"),
        (4.0, "complete"),
    ]
    unnamed = search(client, 4.0, folder=tmp_path / "unnamed")
    unnamed.run.metric = "val/accuracy"
    with pytest.raises(InvalidSetup, match="none of 1 trials was completed"):
        unnamed.optimize(1)


def test_a_trial_that_is_given_up_is_a_cancelled_job(client, search, gate, tmp_path):
    (gate / "go").touch()
    pruner = optuna.pruners.ThresholdPruner(upper=100.0)
    result = search(client, 5.0, 1000.0, pruner=pruner).optimize(2)  # that of 1000 would run for an hour

    [pruned] = [trial for trial in result.trials if trial.state == "pruned"]
    assert pruned.parameters == {"value": 1000.0}
    assert states(client, tmp_path.name)[f"trial-{pruned.number}"] == scheduler_pb2.JOB_STATE_CANCELLED


def test_the_jobs_of_a_killed_search_are_cancelled_by_the_next(client, search, gate, tmp_path):
    left = client.submit(document(python("import time; time.sleep(3600)"), labels={"search": tmp_path.name}))
    running(left)
    folder = tmp_path / "study" / "trial-0000"
    folder.mkdir(parents=True)
    (folder / "job").write_text(left.id)
    (gate / "go").touch()

    search(client, 6.0).optimize(1)

    assert left.status().state == scheduler_pb2.JOB_STATE_CANCELLED
    assert not (folder / "job").exists()


def test_a_yard_that_is_killed_and_started_again_is_waited_for(yard, search, gate):
    with yard.client() as client, ThreadPoolExecutor(1) as thread:
        result = thread.submit(search(client, 7.0).optimize, 1)
        wait_until(lambda: (gate / "7.0").exists(), "the job to run")
        yard.kill()
        yard.up()
        (gate / "go").touch()
        assert result.result().value == 3.5
