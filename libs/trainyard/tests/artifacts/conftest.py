"""A real store, trees to put into it, and ways to make it fail."""

from __future__ import annotations

import pytest

from services.artifacts.tests.store_kit import Yard


@pytest.fixture
async def yard(tmp_path):
    yard = Yard(tmp_path / "home")
    await yard.start()
    yield yard
    await yard.stop()


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "tree"
    folder.mkdir()
    return folder
