"""The examples of this repository, as a user runs them: one command, no yard up."""

import re
import shutil

import pytest

from tests.conftest import REPOSITORY


def test_the_main_job_trains_digits_to_its_accuracy(home, tmp_path):
    shutil.copytree(REPOSITORY / "examples" / "digits", tmp_path / "digits")
    result = home.run("run", tmp_path / "digits" / "job.yaml")
    assert result.returncode == 0, result.stdout + result.stderr
    accuracy = re.search(r"^accuracy: (0\.\d+)", result.stdout, re.MULTILINE)
    assert accuracy and float(accuracy[1]) >= 0.97
    assert "[rank 1]" in result.stdout
    home.assert_nothing_left()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("job", ["job.yaml", "job-zero3.yaml"])
def test_deepspeed_trains_and_resumes_from_its_checkpoint(yard, tmp_path, job):
    shutil.copytree(REPOSITORY / "examples" / "deepspeed", tmp_path / "deepspeed")
    result = yard.run("run", tmp_path / "deepspeed" / job)
    assert result.returncode == 0, result.stdout + result.stderr
    with yard.client() as client:
        versions = list(client.versions(kind="checkpoint", job="@last"))
        assert versions and versions[0].checkpoint.step > 0
