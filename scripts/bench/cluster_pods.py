"""Jobs a second from the first submission through the SDK until all of their pods run.

The peer is a bare asynchronous client that makes the very same Jobs and Services: no queue, no admission, no record,
nobody who watches. Both on the same cluster with fake nodes, by turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from _cluster import bench_cluster, bench_namespace, fake_pods
from _cluster_raw import Raw
from _cluster_yard import NODES, Yard, gang, started
from _harness import Bar, conclude, interleave, spread, table
from trainyard.client import JobHandle
from trainyard_launcher.backends.kubernetes import manifests

from scripts.testbed.cluster.cluster import Cluster

SHARE = 0.6


async def until_running(raw: Raw, namespace: str, pods: int, begin: Callable[[], Awaitable[object]]) -> float:
    """Seconds from the begin until so many pods of the namespace run."""
    async with raw.pods(namespace) as running:
        started_at = time.monotonic()
        await begin()
        await running.reach(pods)
        return time.monotonic() - started_at


async def make_raw(raw: Raw, namespace: str, jobs: Sequence[dict[str, Any]]) -> None:
    """Each Job, then its Service."""

    async def make(job: dict[str, Any]) -> None:
        made = await raw.create(f"/apis/batch/v1/namespaces/{namespace}/jobs", job)
        await raw.create(f"/api/v1/namespaces/{namespace}/services", manifests.service(made))

    await raw.all(map(make, jobs))


def submit(yard: Yard, count: int) -> None:
    """Raises what the yard says of a job that it refuses."""
    with yard.client() as client:
        for answer in client.submit_batch([gang(f"gang-{number}") for number in range(count)]):
            if not isinstance(answer, JobHandle):
                raise answer


def time_yard(cluster: Cluster, count: int) -> float:
    """Jobs a second."""
    with tempfile.TemporaryDirectory(prefix="yard-bench-") as folder, bench_namespace(cluster) as namespace:
        yard = Yard(cluster, namespace, Path(folder), fake_pods())
        with started(yard):
            taken_s = Raw.run(
                cluster.layout,
                lambda raw: until_running(
                    raw, namespace, count * NODES, lambda: asyncio.to_thread(submit, yard, count)
                ),
            )
    return count / taken_s


def time_raw(cluster: Cluster, count: int) -> float:
    """Jobs a second of the bare client."""
    with tempfile.TemporaryDirectory(prefix="yard-bench-") as folder, bench_namespace(cluster) as namespace:
        yard = Yard(cluster, namespace, Path(folder), fake_pods())  # for its Jobs: it does not run
        jobs = [yard.raw_job(number) for number in range(count)]
        taken_s = Raw.run(
            cluster.layout,
            lambda raw: until_running(raw, namespace, count * NODES, lambda: make_raw(raw, namespace, jobs)),
        )
    return count / taken_s


def report(yard: Sequence[float], raw: Sequence[float]) -> int:
    rows = [
        (name, *(f"{value:.1f}" for value in spread(values)))
        for name, values in (("yard, through the SDK", yard), ("bare client", raw))
    ]
    table(f"jobs of {NODES} pods a second, until all pods run", ("", "median", "min", "max"), rows)
    ours, peer = statistics.median(yard), statistics.median(raw)
    return conclude(
        "cluster_pods",
        [
            Bar(
                name="jobs whose pods run",
                ours=ours,
                peer=peer,
                peer_name="bare client",
                unit="1/s",
                bar=SHARE * peer,
                higher_is_better=True,
            )
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--fake-nodes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    count = arguments.jobs
    with bench_cluster(arguments.fake_nodes) as cluster:
        cases = {"yard": lambda: time_yard(cluster, count), "raw": lambda: time_raw(cluster, count)}
        results = interleave(cases, arguments.rounds, warmups=0)
    return report(results["yard"], results["raw"])


if __name__ == "__main__":
    sys.exit(main())
