"""Imports point the way `docs/architecture.md` says; the contracts are in `.importlinter`."""

import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY

LINT = Path(sys.executable).with_name("lint-imports")


def test_dependencies_point_one_way():
    result = subprocess.run([LINT, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_contracts_catch_a_service_that_imports_another(tmp_path):
    for package, source in {"one": "import two", "two": ""}.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(source)
    layers = "[importlinter:contract:parts]\nname = apart\ntype = layers\nlayers =\n    one | two\n"
    (tmp_path / ".importlinter").write_text(f"[importlinter]\nroot_packages =\n    one\n    two\n\n{layers}")
    result = subprocess.run([LINT, "--no-cache"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert "one is not allowed to import two" in result.stdout
