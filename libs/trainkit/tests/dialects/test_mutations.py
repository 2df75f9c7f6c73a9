"""Tests of rows fail when the feature of the row breaks."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
FAULTS = """
[[mutation]]
row = "AC-001"
clause = "another default"
file = "libs/trainkit/src/trainkit/dialects/accmt/trainer.py"
old = "clip_grad: float | None = 1.0"
new = "clip_grad: float | None = 2.0"

[[mutation]]
row = "AC-001"
clause = "a private name"
file = "libs/trainkit/src/trainkit/dialects/accmt/trainer.py"
old = "self.run_arguments = kwargs"
new = "self.run_arguments = dict(kwargs)"

[[mutation]]
row = "AC-001"
clause = "an exception in the constructor"
file = "libs/trainkit/src/trainkit/dialects/accmt/trainer.py"
old = "self.run_arguments = kwargs"
new = "self.run_arguments = kwargs + 1"
"""


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.dialects", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_ten_rows_of_the_day_fail_when_their_feature_breaks() -> None:
    done = command("--break", "--date", datetime.now(UTC).date().isoformat())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_every_row_fails_when_its_feature_breaks() -> None:
    done = command("--break")
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_a_failed_comparison_counts_as_caught(tmp_path: Path) -> None:
    (tmp_path / "accmt").mkdir()
    (tmp_path / "accmt" / "faults.toml").write_text(FAULTS)
    done = command("--break", "AC-001", "--data", tmp_path)
    results = {line.split(" | ")[1]: line.split(" | ")[3:] for line in done.stdout.splitlines() if "AC-001" in line}
    assert [result for result, _ in results.values()] == ["caught", "survived", "crashed"], done.stdout + done.stderr
    assert "assert found == PARAMETERS.split()" in results["another default"][1]
    assert "TypeError" in results["an exception in the constructor"][1]
    assert "1 caught, 2 not caught" in done.stdout and done.returncode == 1


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("clip_grad: float | None = 3.0", "clip_grad: float | None = 2.0", "occurs 0 times"),
        ("artifacts, checks, running, saving", "artifacts, checks, running", "changes names or parameters"),
        ("self.run_arguments = kwargs", "raise ValueError", "the new text raises"),
        ("self.run_arguments = kwargs", "self.run_arguments = (kwargs)", "means the same"),
    ],
)
def test_a_mutation_that_does_not_apply_or_does_more_than_it_may_fails_the_check(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    from scripts.dialects import mutations

    (tmp_path / "accmt").mkdir()
    (tmp_path / "accmt" / "faults.toml").write_text(
        FAULTS.replace("clip_grad: float | None = 1.0", old, 1).replace("clip_grad: float | None = 2.0", new, 1)
    )
    first, *_ = mutations.problems(mutations.load(tmp_path))
    assert first.startswith("AC-001 (another default)") and problem in first


def test_a_row_without_a_mutation_fails_the_check(tmp_path: Path) -> None:
    (tmp_path / "accmt").mkdir()
    (tmp_path / "accmt" / "faults.toml").write_text(FAULTS)
    done = command("--lint", "--data", tmp_path)
    assert done.returncode == 1
    assert "AC-002 (accmt): no mutation breaks this row" in done.stderr and "AC-001" not in done.stderr
