"""What is generated is what its source generates; nobody edits it by hand."""

import subprocess

import pytest

from tests.conftest import REPOSITORY


@pytest.mark.parametrize("generator", ["codegen", "docs"])
def test_generated_files_are_what_their_source_generates(generator):
    result = subprocess.run([REPOSITORY / "scripts" / generator, "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
