"""One server of forked processes for all tests here."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_SPEC = importlib.util.spec_from_file_location("trainkit_test_forks", Path(__file__).with_name("forks.py"))
assert _SPEC is not None and _SPEC.loader is not None
_FORKS = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_FORKS)


@pytest.fixture(autouse=True)
def without_searching_imports_for_garbage() -> None:
    """Makes `gc.collect` in a run cost what the run left: torch alone has half a million objects."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries report what they find uncollected at the end of the process


@pytest.fixture(scope="session")
def forks() -> Iterator[Any]:
    """Runs functions of the test's file in processes that can be killed."""
    server = _FORKS.Forks()
    yield server
    server.close()
