"""Fixtures with a real Kubernetes cluster.

All sessions of tests, and all workers of one, share the cluster that TRAINYARD_TESTBED_CLUSTER names. A session that
finds none starts it, and the last one that uses it takes it down again; a cluster that was started by hand stays.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from scripts.testbed.cluster import locks, system
from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S
from scripts.testbed.runs import run

_SWITCH = "TRAINYARD_CLUSTER"
_PATIENCE_S = 8 * PATIENCE_S


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test on the cluster may wait for its turn, while others have the cluster alone."""
    if "cluster" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(_PATIENCE_S))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster with all of its parts, shared with other tests."""
    if os.environ.get(_SWITCH) == "0":
        pytest.skip(f"{_SWITCH}=0 switches the tests on a cluster off")
    if obstacle := system.obstacle():
        pytest.skip(obstacle)
    found = Cluster()
    with run.cleaned_up_if_killed(*found.command("down", "--if-unused", f"--killed={run.name()}")):
        with locks.using(found.layout):
            with locks.sharing(found.layout):  # what another worker's test has stopped stays so until its end
                found.up(for_tests=True)
            yield found
        found.down_after_tests()


@pytest.fixture
def cluster_alone(cluster: Cluster, _turn_on_the_cluster: None) -> Iterator[Cluster]:
    """A cluster that no other test uses meanwhile: this one may stop parts of it, which are brought back afterwards."""
    yield cluster
    cluster.up(for_tests=True)


@pytest.fixture
def cluster_namespace(cluster: Cluster, _turn_on_the_cluster: None) -> Iterator[str]:
    """An empty namespace of the cluster, removed with all that is in it afterwards."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.create_namespace(name)
    cluster.wait_for_service_account(name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(autouse=True)
def _turn_on_the_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    with ExitStack() as held:
        if "cluster" in request.fixturenames:
            lock = locks.alone if "cluster_alone" in request.fixturenames else locks.sharing
            held.enter_context(lock(request.getfixturevalue("cluster").layout))
        yield
