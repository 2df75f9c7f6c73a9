"""Every command of the README and the guides does what the page says, in a fresh home."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.testbed.patience import PATIENCE_S
from tests.conftest import REPOSITORY, YardHome
from tests.docs.transcript import Command, File, steps

GUIDES = sorted((REPOSITORY / "docs" / "guides").glob("*.md"))
ON_A_CLUSTER = {"kubectl", "kubernetes", "security"}  # what they say is done by tests/cluster
MARK = "-- working directory: "
CHECKOUT_OWN = ("examples", ".git")  # copied or left out; the rest is linked into the reader's checkout


class Reader:
    """Somebody who follows a page: one terminal, with `yard` on the path."""

    def __init__(self, folder: Path, home: YardHome) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environ = home.environ | {"PATH": path, "COLUMNS": "120"}

    def write(self, file: File) -> None:
        (self.folder / file.name).write_text(file.content)

    def run(self, command: Command) -> None:
        script = f'{command.text}\ncode=$?\necho "{MARK}$PWD"\nexit $code\n'
        result = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * PATIENCE_S,
        )
        output, _, folder = result.stdout.rpartition(MARK)
        self.folder = Path(folder.strip())
        assert result.returncode == command.exit_code, f"$ {command.text}\n{output}"
        missing = command.missing_from(output)
        assert missing is None, f"$ {command.text}\ndoes not print, in this order: {missing}\nbut:\n{output}"

    def follow(self, page: str) -> int:
        """Does everything the page says. Returns how many commands that were."""
        commands = 0
        for step in steps(page):
            if isinstance(step, File):
                self.write(step)
            else:
                self.run(step)
                commands += 1
        return commands


@pytest.fixture(scope="module")
def installed():
    """`make run` would reinstall the packages from the reader's folder, in the environment that all tests share."""
    current = (
        subprocess.run(["make", "--question", ".venv/.ready"], cwd=REPOSITORY, capture_output=True).returncode == 0
    )
    assert current, ".venv is older than a pyproject.toml or uv.lock: run `make setup` and test again"


@pytest.fixture
def reader(home, tmp_path, installed):
    """In a checkout of their own, with the examples as they are in git."""
    for entry in REPOSITORY.iterdir():
        if entry.name not in CHECKOUT_OWN:
            (tmp_path / entry.name).symlink_to(entry)
    generated = shutil.ignore_patterns("checkpoints", "exports", ".saving", "__pycache__")
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples", ignore=generated)
    yield Reader(tmp_path, home)
    home.run("down", "--yes")
    home.assert_nothing_left()


def test_the_readme_runs_the_main_job(reader):
    assert reader.follow((REPOSITORY / "README.md").read_text()) == 4


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_every_command_of_the_guide_does_what_it_says(guide, reader, tmp_path_factory):
    page = guide.read_text()
    if any(isinstance(step, File) for step in steps(page)):
        reader.folder = tmp_path_factory.mktemp("project")
    assert reader.follow(page) > 0 or guide.stem in ON_A_CLUSTER
