"""A yard's home is its owner's alone, and its jobs do not inherit their owner's credentials unawares."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from trainyard.client import yards
from trainyard.errors import InvalidArgument
from trainyard.inherited import inherited, withheld_credentials


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in withheld_credentials(os.environ, ()):
        monkeypatch.delenv(name)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_what_is_open_to_others_in_a_home_is_closed_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("token", "attempt.key", "contexts.json"):
        (tmp_path / name).touch(mode=0o644)
    tmp_path.chmod(0o755)
    yards.prepare(tmp_path)
    assert mode(tmp_path) == 0o700
    assert {mode(file) for file in tmp_path.iterdir()} == {0o600}
    assert f"{tmp_path}/token was open to others (mode 644): it is yours alone now" in caplog.messages
    caplog.clear()
    yards.prepare(tmp_path)
    assert not caplog.messages


def test_a_folder_that_others_use_becomes_no_home(tmp_path: Path) -> None:
    (tmp_path / "data.csv").touch()
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidArgument, match=r"mode 777.*holds other things") as refused:
        yards.prepare(tmp_path)
    assert "chmod go=" in refused.value.hint
    assert mode(tmp_path) == 0o777


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("of_another", [".", "token"])
def test_a_home_of_another_user_is_refused(tmp_path: Path, of_another: str) -> None:
    (tmp_path / "token").touch(mode=0o600)
    os.chown(tmp_path / of_another, 12345, 12345)
    with pytest.raises(InvalidArgument, match="belongs to another user"):
        yards.prepare(tmp_path)


def test_a_home_whose_log_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "yard.log").mkdir()
    with pytest.raises(InvalidArgument, match=r"yard\.log cannot be written: Is a directory"):
        yards.start_reading(tmp_path)


def test_credentials_that_jobs_do_not_inherit_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    monkeypatch.setenv("TRAINYARD_TOKEN", "hunter2")
    for _ in range(2):
        yards.prepare(tmp_path)
    monkeypatch.setenv("db_password", "hunter2")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("TRAINYARD_LAUNCHER_INHERIT_ENVIRONMENT", "HF_*")
    yards.prepare(tmp_path)
    first, second = caplog.messages
    assert "not passed to jobs: WANDB_API_KEY. " in first and "spec.secrets" in first
    assert "TRAINYARD_LAUNCHER_INHERIT_ENVIRONMENT=WANDB_API_KEY" in first
    assert "not passed to jobs: db_password. " in second
    assert "hunter2" not in caplog.text


def test_jobs_inherit_what_programs_need_and_what_is_declared() -> None:
    needed = ("PATH", "LC_ALL", "CONDA_PREFIX", "CUDA_HOME", "https_proxy", "REQUESTS_CA_BUNDLE")
    others = ("NVIDIA_API_KEY", "HF_HOME", "HF_TOKEN", "PYTHONPATH", "AWS_SECRET_ACCESS_KEY", "MY_PATH")
    environ = dict.fromkeys((*needed, *others), "x")
    assert set(inherited(environ, ())) == set(needed)
    assert set(inherited(environ, ["HF_*", "PYTHONPATH"])) == {*needed, "HF_HOME", "HF_TOKEN", "PYTHONPATH"}
    assert withheld_credentials(environ, ["HF_*"]) == ["AWS_SECRET_ACCESS_KEY", "NVIDIA_API_KEY"]


def test_without_the_services_the_package_that_has_them_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trainyard_embedded", None)
    for begin in (yards.start, yards.start_reading):
        with pytest.raises(InvalidArgument, match="services of a yard are not installed") as caught:
            begin(tmp_path / "home")
        assert "trainyard[yard]" in caught.value.hint
    assert not (tmp_path / "home").exists()
