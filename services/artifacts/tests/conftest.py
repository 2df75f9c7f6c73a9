"""A store of the test's own, and trees to put into it."""

from __future__ import annotations

import subprocess

import pytest

from services.artifacts.tests.store_kit import Yard


@pytest.fixture
async def yard(tmp_path, database_url):
    """A store on either database."""
    yard = Yard(tmp_path / "home", database_url)
    await yard.start()
    yield yard
    await yard.stop()


@pytest.fixture
def tree(tmp_path):
    """Makes a folder of files: `tree({"a/b.txt": b"..."})`."""
    made = 0

    def make(files):
        nonlocal made
        made += 1
        root = tmp_path / f"tree-{made}"
        root.mkdir()
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        return root

    return make


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "trainyard-test", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
