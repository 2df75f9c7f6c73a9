"""What the tests here share: a server of forked processes, and what they expect of their own process."""

from __future__ import annotations

import gc
import importlib.util
import signal
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


@pytest.fixture
def sigint_raises() -> Iterator[None]:
    """Lets SIGINT raise KeyboardInterrupt: a process that a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
