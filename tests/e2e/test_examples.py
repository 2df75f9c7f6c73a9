"""The examples of this repository, as a user runs them: one command, no yard up."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from scripts.testbed.patience import PATIENCE_S
from tests.conftest import REPOSITORY, wait_until
from tests.jobs import document, output


@pytest.fixture(scope="module")
def mode():
    """Workers are the agent's business, which is the same process in both modes."""
    return "embedded"


def test_the_main_job_trains_digits_to_its_accuracy(home, tmp_path):
    shutil.copytree(REPOSITORY / "examples" / "digits", tmp_path / "digits")
    result = home.run("run", tmp_path / "digits" / "job.yaml")
    assert result.returncode == 0, result.stdout + result.stderr
    accuracy = re.search(r"^accuracy: (0\.\d+)", result.stdout, re.MULTILINE)
    assert accuracy and float(accuracy[1]) >= 0.97
    assert "[rank 1]" in result.stdout
    home.assert_nothing_left()


GATED = """
import os, time
from with_trainkit import parse, trainer
from trainkit import Callback

class Gate(Callback):
    def on_epoch_done(self, fit):
        while fit.state.epoch == 4 and "TRAINYARD_RESUME_FROM" not in os.environ:
            time.sleep(0.1)  # until it is killed

ready = trainer(parse())
ready.callbacks = [*ready.callbacks, Gate()]
fit = ready.fit()
if fit.strategy.is_main:
    print(f"resumed at {fit.resumed_step}, accuracy: {fit.results['val/accuracy']:.4f}")
"""


def test_digits_on_trainkit_resume_on_two_nodes_that_share_no_disk(yard, tmp_path):
    folder = shutil.copytree(REPOSITORY / "examples" / "digits", tmp_path / "digits")
    (folder / "gated.py").write_text(GATED)
    spec = (folder / "job-trainkit.yaml").read_text()
    gated = spec.replace('with_trainkit.py, --epochs, "20"', 'gated.py, --epochs, "10"')
    assert gated != spec
    (folder / "job.yaml").write_text(gated)
    with yard.client() as client:
        job = client.submit(folder / "job.yaml")
        wait_until(
            lambda: any(
                version.checkpoint.step == 4 * 23 for version in client.versions(kind="checkpoint", job=job.id)
            ),
            "the checkpoint of both nodes after four epochs",
        )
        yard.workers("gated.py")[0].kill()
        ended = job.wait(PATIENCE_S)

        assert [attempt.exit.reason for attempt in ended.attempts] == ["WorkerFailed", "Completed"]
        far = [(attempt.exit.progress.step, attempt.exit.progress.total_steps) for attempt in ended.attempts]
        assert far == [(4 * 23, 10 * 23), (10 * 23, 10 * 23)]
        [said] = [line for line in output(job) if "accuracy" in line]
        found = re.fullmatch(r"resumed at 92, accuracy: (0\.\d+)", said)
        assert found and float(found[1]) >= 0.97
        assert list(job.metrics("val/accuracy")["val/accuracy"].step) == [23 * epoch for epoch in range(1, 11)]
        accuracy = job.metrics("val/accuracy")["val/accuracy"].value
        best = client.artifact(f"checkpoints-{job.id}@best")
        assert best.checkpoint.metrics["val/accuracy"] == max(accuracy)
        inputs = [{"artifact": f"checkpoints-{job.id}@best", "path": "in"}]
        reader = client.submit(document(["ls", "in"], inputs=inputs))
        assert reader.wait(PATIENCE_S)
        assert [version.id for version in client.lineage(job=reader.id).made_from] == [best.id]
        [model] = client.versions(job=job.id, kind="output")
        assert model.name == "digits-trainkit-model"


@pytest.mark.exhaustive
def test_a_search_on_digits_runs_each_trial_as_a_job(yard, tmp_path):
    folder = shutil.copytree(REPOSITORY / "examples" / "digits", tmp_path / "digits")
    command = [sys.executable, "search.py", "--trials", "3", "--epochs", "4"]
    result = subprocess.run(command, cwd=folder, env=yard.environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found = re.match(r"accuracy: (0\.\d+) with lr=", result.stdout)
    assert found and float(found[1]) >= 0.9
    with yard.client() as client:
        assert {job.name for job in client.list(labels={"search": "digits"})} == {f"digits-trial-{n}" for n in range(3)}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("regression", r"^held-out R2: 0\.[2-5]\d+", id="regression"),
        pytest.param(
            "language-model",
            r"^\[rank 0\] 614400 characters; held-out loss: [12]\.\d+ nats",
            marks=pytest.mark.exhaustive,
            id="language model",
        ),
        pytest.param("fine-tuning", r"^held-out accuracy: 0\.[6-9]\d+", marks=pytest.mark.exhaustive, id="fine-tuning"),
    ],
)
def test_a_job_on_trainkit_says_what_it_learned(home, tmp_path, name, said):
    shutil.copytree(REPOSITORY / "examples" / name, tmp_path / name)
    result = home.run("run", tmp_path / name / "job.yaml")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(said, result.stdout, re.MULTILINE), result.stdout
    far = json.loads(home.run("status", "-o", "json").stdout)["exit"]["progress"]
    assert far["step"] == far["totalSteps"] != 0
    home.assert_nothing_left()


def test_scripts_of_accmt_run_as_a_job_without_a_change(home, tmp_path):
    shutil.copytree(REPOSITORY / "examples" / "accmt", tmp_path / "accmt")
    result = home.run("run", tmp_path / "accmt" / "job.yaml")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"test accuracy: 0\.(8|9)\d", result.stdout), result.stdout
    home.assert_nothing_left()


@pytest.fixture(scope="module")
def compiler() -> None:
    """DeepSpeed compiles an extension at its first start; ninja comes with the environment."""
    if shutil.which("g++") is None:
        assert shutil.which("apt-get") and os.geteuid() == 0, "DeepSpeed needs g++: install it and test again"
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-qq", "-y", "g++"], check=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("job_file", ["job.yaml", pytest.param("job-zero3.yaml", marks=pytest.mark.exhaustive)])
def test_deepspeed_trains_and_resumes_from_its_checkpoint(compiler, yard, tmp_path, job_file):
    shutil.copytree(REPOSITORY / "examples" / "deepspeed", tmp_path / "deepspeed")
    with yard.client() as client:
        job = client.submit(tmp_path / "deepspeed" / job_file)
        wait_until(lambda: any(client.versions(kind="checkpoint", job=job.id)), "a checkpoint", 600)
        yard.workers()[0].kill()
        ended = job.wait()
        assert [attempt.exit.reason for attempt in ended.attempts] == ["WorkerFailed", "Completed"]
        assert ended.attempts[1].exit.resumed_from
        assert list(job.metrics("accuracy")["accuracy"].step) == list(range(1, 11))
        assert job.values()["accuracy"] >= 0.9
