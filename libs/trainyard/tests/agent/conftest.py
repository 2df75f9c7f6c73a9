from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # with --import-mode=importlib, nothing else finds agent_yard.py

from agent_yard import Attempt, Yard


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    home = tmp_path / "home"
    home.mkdir()
    yard = Yard(home)
    await yard.start()
    yield yard
    await yard.stop()


@pytest.fixture
def attempt(yard: Yard, tmp_path: Path) -> Callable[..., Attempt]:
    """Makes attempts: `attempt(["sh", "-c", "exit 3"], workers_per_node=2)`."""
    count = 0

    def make(command: list[str], **plan: Any) -> Attempt:
        nonlocal count
        count += 1
        return Attempt(yard, tmp_path / f"attempt-{count}" / f"node-{plan.get('node', 0)}", command=command, **plan)

    return make
