"""The testbed's cluster for the length of a benchmark, with fake nodes that take pods as any others do."""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
from collections.abc import Iterator
from typing import Any

from _cluster_raw import Raw
from _repository import REPOSITORY

from scripts.testbed.cluster import kwok, locks
from scripts.testbed.cluster.cluster import Cluster

__all__ = ["REPOSITORY", "bench_cluster", "bench_namespace", "fake_pods"]


@contextlib.contextmanager
def bench_cluster(fake_nodes: int = 0) -> Iterator[Cluster]:
    """A cluster that is whole; one that was not up before is taken down again. SIGTERM leaves nothing on it either.

    Args:
        fake_nodes: so many nodes of kwok take pods meanwhile, without their usual taint: a yard counts on machines
            that take any pod.
    """
    signal.signal(signal.SIGTERM, _end)
    cluster = Cluster()
    with locks.using(cluster.layout), locks.sharing(cluster.layout):
        cluster.up(fake_nodes, for_tests=True)
        try:
            _taint(cluster, fake_nodes, None)
            yield cluster
        finally:
            _taint(cluster, fake_nodes, kwok.nodes(1)["items"][0]["spec"]["taints"])
    cluster.down_after_tests()


def _end(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # what is being taken away is taken away whole
    sys.exit(128 + number)


def _taint(cluster: Cluster, count: int, taints: list[dict[str, str]] | None) -> None:
    patch = {"spec": {"taints": taints}}
    names = [f"kwok-{number}" for number in range(count)]
    Raw.run(cluster.layout, lambda raw: raw.all(raw.patch(f"/api/v1/nodes/{name}", patch) for name in names))


@contextlib.contextmanager
def bench_namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of its own, gone with everything in it afterwards: rounds leave each other nothing."""
    name = f"bench-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", name)
    cluster.wait_for_service_account(name)
    try:
        yield name
    finally:
        Raw.run(cluster.layout, lambda raw: raw.clear(name))
        cluster.kubectl("delete", "namespace", name)


def fake_pods() -> dict[str, Any]:
    """The template of pods that fake nodes take."""
    return {"spec": {"nodeSelector": {kwok.LABEL: "kwok"}}}
