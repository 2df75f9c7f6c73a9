"""The examples on real data run and learn, on one process and with settings that take seconds."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def example(folder: str, name: str, arguments: list[str]) -> None:
    os.environ["TRAINYARD_HOME"] = str(Path(folder) / "home")
    os.chdir(folder)
    sys.argv = ["train.py", *arguments]
    runpy.run_path(str(EXAMPLES / name / "train.py"), run_name="__main__")


@pytest.mark.parametrize(
    ("name", "arguments", "result", "least", "most"),
    [
        pytest.param(
            "language-model",
            "--length 32 --width 32 --depth 1 --steps 30 --batch-size 16 --megabytes 0.1",
            r"held-out loss: (\d\.\d+) nats",
            1.0,
            4.2,  # knowing nothing costs log(128), 4.85
            id="language model",
        ),
        pytest.param("regression", "--epochs 10", r"held-out R2: (-?\d\.\d+)", 0.2, 0.7, id="regression"),
        pytest.param(
            "fine-tuning",
            "--epochs 3 --pieces 250",
            r"held-out accuracy: (\d\.\d+)",
            0.5,  # by chance: 0.25
            1.01,
            id="fine-tuning",
        ),
    ],
)
def test_an_example_learns(
    tmp_path: Path, forks: Any, name: str, arguments: str, result: str, least: float, most: float
) -> None:
    forks.succeed(example, tmp_path, name=name, arguments=arguments.split())

    said = (tmp_path / "rank-0.log").read_text()
    found = re.search(result, said)
    assert found is not None, said
    assert least < float(found[1]) < most
    assert any((tmp_path / "checkpoints").glob("step-*"))
