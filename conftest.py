"""Real servers for the tests of every part, one way to draw examples, and the order of the files."""

import functools
import os
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

pytest_plugins = ["scripts.testbed.plugin", "scripts.testbed.cluster.plugin"]

_ROOT = Path(__file__).parent

# Tests share the cores: threads that wait for each other's turn would only spin. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests never time anything, and two runs of the same tests see the same examples.
settings.register_profile("trainyard", deadline=None, derandomize=True)
settings.load_profile("trainyard")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files are handed out in this order. While a test has the cluster alone, others on the cluster wait: so one
    process begins with all of those, beside files without a cluster; the cluster's others follow, short files last."""
    fixtures: dict[Path, set[str]] = defaultdict(set)
    for item in items:
        fixtures[item.path].update(getattr(item, "fixturenames", ()))
    items.sort(key=lambda item: _turn(item.path, fixtures[item.path]))


def _turn(file: Path, fixtures: set[str]) -> int:
    if _wants_the_cluster_alone(file):
        return 0
    if not file.is_relative_to(_ROOT / "tests"):
        return 3
    return 2 if "cluster" in fixtures else 1


@functools.cache
def _wants_the_cluster_alone(file: Path) -> bool:
    """Told by its text, as the process that hands files out does not import them."""
    return "cluster_alone" in file.read_text()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return _Files(config, log) if config.getoption("dist") == "loadfile" else None


class _Files(LoadFileScheduling):
    """A process gets whole files, and one gets all those that want the cluster alone: two would wait for each other."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "cluster_alone" if _wants_the_cluster_alone(_ROOT / file) else file
