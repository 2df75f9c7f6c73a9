"""Real servers for the tests of every part, one way to draw examples, and the order of the files."""

import os
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["scripts.testbed.plugin", "scripts.testbed.cluster.plugin"]

# Tests share the cores: threads that wait for each other's turn would only spin. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests never time anything, and two runs of the same tests see the same examples.
settings.register_profile("trainyard", deadline=None, derandomize=True)
settings.load_profile("trainyard")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files are handed out in this order. While a test has the cluster alone, others on the cluster wait: so those
    files begin at once, beside long files without a cluster; the cluster's others follow, and short files come last."""
    fixtures: dict[Path, set[str]] = defaultdict(set)
    for item in items:
        fixtures[item.path].update(getattr(item, "fixturenames", ()))
    items.sort(key=lambda item: _turn(item.path, fixtures[item.path]))


def _turn(file: Path, fixtures: set[str]) -> int:
    if "cluster_alone" in fixtures:
        return 0
    if not file.is_relative_to(Path(__file__).parent / "tests"):
        return 3
    return 2 if "cluster" in fixtures else 1
