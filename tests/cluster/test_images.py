"""The images, built from their Dockerfiles: what is in them, and that the agent runs in images of others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from scripts.testbed import images
from scripts.testbed.cluster import system
from scripts.testbed.patience import PATIENCE_S
from tests.conftest import REPOSITORY

SERVICES = ("scheduler", "launcher", "metrics", "artifacts", "operator")
AGENT_PYTHON = "/opt/trainyard/bin/python"
CONFLICTING = REPOSITORY / "tests" / "cluster" / "user_images" / "conflicting"

pytestmark = [
    pytest.mark.skipif(system.obstacle() != "", reason=f"no images can be built here: {system.obstacle()}"),
    pytest.mark.timeout(8 * PATIENCE_S),
]


def run_in(root: Path, *command: str, **environ: str) -> str:
    """Runs a program with a folder as its root, as the images' user; returns what it printed."""
    chroot = shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin:/bin")
    assert chroot is not None
    done = subprocess.run(
        [chroot, "--userspec=65532:65532", str(root), *command],
        env={"PATH": "/opt/services/bin:/usr/bin:/bin", "LOGNAME": "trainyard", **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def services() -> Iterator[Path]:
    """The files of the services' image."""
    images.archive("services")
    with images.mounted(images.reference("services")) as root:
        yield root


@pytest.fixture(scope="module")
def agent() -> Iterator[Path]:
    """The files of the agent's image."""
    images.archive("agent")
    with images.mounted(images.reference("agent")) as root:
        yield root


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_starts_as_nobody_in_particular(services: Path, service: str) -> None:
    assert f"usage: python -m trainyard_{service}" in run_in(services, "python", "-m", f"trainyard_{service}", "--help")


def test_the_services_image_has_no_training_framework(services: Path) -> None:
    installed = {path.name for path in (services / "opt/services/lib/python3.11/site-packages").iterdir()}
    assert "trainyard_scheduler" in installed
    assert not {"torch", "deepspeed", "trainkit", "sklearn", "transformers"} & installed


def test_what_runs_cannot_change_the_image(services: Path) -> None:
    for path in ("opt/services", "usr/bin", "etc"):
        assert (services / path).stat().st_uid == 0
    writable = "find /opt /usr -writable -not -type l -print -quit"
    assert run_in(services, "sh", "-c", writable).strip() == ""


@pytest.mark.parametrize("name", ["services", "agent"])
def test_the_image_says_that_it_runs_as_nobody(name: str) -> None:
    images.archive(name)
    assert images.configuration(images.reference(name))["User"] == "65532:65532"


def test_the_agent_runs_where_there_is_nothing_at_all(agent: Path, tmp_path: Path) -> None:
    """No shell, no Python, no C library."""
    root = tmp_path / "empty"
    shutil.copytree(agent / "opt/trainyard", root / "opt/trainyard", symlinks=True)
    tmp_path.chmod(0o755)
    code = "import grpc, trainyard.agent.supervisor; print(grpc.__version__)"
    assert run_in(root, AGENT_PYTHON, "-c", code).strip() == grpc.__version__
    assert "py-spy" in run_in(root, "/opt/trainyard/bin/py-spy", "--version")
    assert "uv" in run_in(root, "/opt/trainyard/bin/uv", "--version")


def test_the_agent_and_the_users_python_do_not_see_each_others_packages(agent: Path, tmp_path: Path) -> None:
    tag = "localhost/trainyard/test-conflicting:1"
    images.build("Dockerfile", tag, CONFLICTING)
    code = "import google.protobuf, grpc, json; print(json.dumps([grpc.__version__, google.protobuf.__version__]))"
    with images.mounted(tag) as root:
        shutil.copytree(agent / "opt/trainyard", root / "opt/trainyard", symlinks=True)
        theirs = {"PYTHONPATH": "/opt/theirs", "PYTHONHOME": "/usr", "LD_LIBRARY_PATH": "/opt/theirs"}
        assert json.loads(run_in(root, "python3.11", "-c", code, **theirs)) == ["1.60.2", "4.25.8"]
        ours = json.loads(run_in(root, AGENT_PYTHON, "-c", code, **theirs))
        assert ours[0] == grpc.__version__
        assert "trainyard" in run_in(
            root, AGENT_PYTHON, "-c", "import trainyard.agent.supervisor as s; print(s)", **theirs
        )


def test_the_agents_image_copies_it_to_a_volume_of_somebody_else(agent: Path) -> None:
    """What an init container does."""
    target = agent / "target"
    target.mkdir()
    target.chmod(0o777)
    said = images.configuration(images.reference("agent"))
    run_in(agent, *said["Entrypoint"], *said["Cmd"])
    assert {path.name for path in target.iterdir()} == {"bin", "lib"}
    assert (target / "bin/python").stat().st_mode & 0o111


def listed_for_the_worker(folder: Path, *another_torch: str) -> set[str]:
    """The packages that the worker's image gets from PyPI."""
    script = REPOSITORY / "images" / "worker" / "list"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["sh", str(script), str(folder), *another_torch]
    subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"PATH": path}, check=True, timeout=PATIENCE_S)
    return set(re.findall(r"^([a-z][^=]*)==", (folder / "packages.txt").read_text(), re.MULTILINE))


def test_the_worker_has_nothing_of_cuda_when_pytorch_comes_from_another_index(tmp_path: Path) -> None:
    usual, another = listed_for_the_worker(tmp_path / "usual"), listed_for_the_worker(tmp_path / "another", "another")
    assert {"torch", "triton", "nvidia-cublas", "cuda-toolkit", "deepspeed", "ninja", "transformers"} <= usual
    gone = {each for each in usual if each.startswith(("nvidia-", "cuda-")) and each != "nvidia-ml-py"}
    assert usual - another == gone | {"torch", "triton"}
    assert re.fullmatch(r"torch==[0-9.]+\n", (tmp_path / "another" / "torch.txt").read_text())
    assert not (tmp_path / "usual" / "torch.txt").exists()
