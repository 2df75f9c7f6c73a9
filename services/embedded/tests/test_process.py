import sqlite3
import subprocess
import sys

from scripts.testbed.patience import PATIENCE_S


def test_a_yard_whose_late_service_cannot_start_says_why_and_ends(tmp_path):
    with sqlite3.connect(tmp_path / "metrics.db") as database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        database.execute("INSERT INTO alembic_version VALUES ('9999')")
    command = [sys.executable, "-m", "trainyard_embedded", "--home", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 1
    assert "newer than this release" in result.stderr
    assert not (tmp_path / "yard.json").exists()
