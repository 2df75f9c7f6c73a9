"""Yards whose jobs run as pods of the testbed's cluster."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scripts.testbed.cluster import locks
from scripts.testbed.cluster.cluster import Cluster
from tests.cluster.yards import ClusterYard, running


@pytest.fixture(scope="session")
def yard_on_cluster(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterYard]:
    """A yard for all tests, which do not stop it; its jobs do not mind each other. Nothing of it is left at the end."""
    made = contextmanager(in_a_namespace)(cluster, tmp_path_factory)
    with locks.lasting(cluster.layout, made) as yard:
        yield yard


@pytest.fixture
def own_yard(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterYard]:
    """A yard of the test's own, in a namespace of its own."""
    yield from in_a_namespace(cluster, tmp_path_factory)


def in_a_namespace(cluster: Cluster, folders: pytest.TempPathFactory, **settings: str) -> Iterator[ClusterYard]:
    namespace = f"jobs-{secrets.token_hex(4)}"
    cluster.create_namespace(namespace)
    cluster.wait_for_service_account(namespace)
    try:
        with running(cluster, namespace, folders.mktemp("yard"), **settings) as yard:
            yield yard
            yard.start()
            yard.cancel_all()
            yard.assert_nothing_left()
    finally:
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")
