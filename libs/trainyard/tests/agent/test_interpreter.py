"""Which Python a run records: the one that its command runs."""

import platform
import sys
from pathlib import Path

import pytest
from trainyard.agent.interpreter import interpreter


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """A PATH of two environments; the second one has `python` as well."""
    for name, programs in (("first", ("python3",)), ("second", ("python", "python3.99"))):
        (tmp_path / name / "bin").mkdir(parents=True)
        for program in programs:
            (tmp_path / name / "bin" / program).symlink_to(sys.executable)
        (tmp_path / name / "lib" / "python3.11" / "site-packages" / f"{name}-1.0.dist-info").mkdir(parents=True)
    return [str(tmp_path / name / "bin") for name in ("first", "second")]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("python", "second"),
        ("python3", "first"),
        ("python3.99", "second"),
        ("second/bin/python", "second"),
        ("{path}/second/bin/python", "second"),
        ("train.py", "first"),
        ("./run.sh", "first"),
    ],
)
def test_the_python_of_the_command_is_recorded(tmp_path: Path, folders: list[str], program: str, expected: str) -> None:
    recorded = interpreter(program.format(path=tmp_path), folders, str(tmp_path))
    assert recorded == {"python": platform.python_version(), "packages": {expected: "1.0"}}


def test_a_python_that_is_not_there_is_not_recorded(tmp_path: Path, folders: list[str]) -> None:
    assert interpreter("python2", folders, str(tmp_path)) == {}
    assert interpreter("third/bin/python", folders, str(tmp_path)) == {}
