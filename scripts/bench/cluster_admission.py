"""TrainingJob resources of 4 pods by the thousand: how fast they are admitted, and how fast their pods run.

(a) Launching held back: from the first apply to the last admission, and what that costs the yard and its operator.
(b) Launching on: from the first apply until all pods run, beside a bare client that makes the same Jobs and Services,
and Kubeflow's training operator. Afterwards, with the cluster full and a few more jobs that have to wait, every
resource's status is compared with the yard and with the pods that there are.

The pods are fake ones, in which no agent speaks: a job whose pods run is Starting, for the yard waits for its agents.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _cluster import bench_cluster, bench_namespace, fake_pods
from _cluster_kubeflow import PYTORCHJOBS, kubeflow, pytorch_job
from _cluster_raw import RESOURCES, Raw
from _cluster_yard import NODES, Operator, Services, Yard, gang, started
from _harness import Bar, conclude, progress, table
from cluster_pods import make_raw, until_running
from trainyard.client import AsyncClient
from trainyard_protos.v1 import scheduler_pb2

from scripts.testbed.cluster.cluster import Cluster
from tests.cluster import resources

KUEUE_PER_S = 43
GPU = 1
_WAITING = 20
_SETTLE_S = 1800
_PODS_OWN = ("pods", "nodes", "leases", "serviceaccounts")
_TOLD_OF_PODS = ("events", "endpoints", "endpointslices")
"""What the cluster makes of pods: so much of it as the bare client's pods lead to is the pods' own."""
Requests = Counter[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Admitted:
    """Launching held back."""

    per_s: float
    cpu_s_per_job: float


@dataclass(frozen=True, slots=True)
class Launched:
    """Launching on."""

    per_s: float
    bytes_per_job: float
    requests: Requests


@dataclass(frozen=True, slots=True)
class Running:
    """A yard with its operator, on the loop of a benchmark."""

    yard: Yard
    services: Services
    namespace: str

    async def apply(self, raw: Raw, names: Sequence[str]) -> None:
        path = RESOURCES.format(self.namespace)
        await raw.all(raw.apply(path, gang(name, GPU)) for name in names)

    def client(self) -> AsyncClient:
        token = (self.yard.folder / "token").read_text().strip()
        return AsyncClient(self.yard.endpoint, token=token, ca_file=self.yard.ca_file)


@contextmanager
def running(cluster: Cluster, *, held: bool = False) -> Iterator[Running]:
    """A yard and its operator in a namespace of their own."""
    with tempfile.TemporaryDirectory(prefix="yard-bench-") as folder, bench_namespace(cluster) as namespace:
        yard = Yard(cluster, namespace, Path(folder) / "yard", fake_pods(), held=held)
        operator = Operator(yard, Path(folder) / "operator")
        with started(yard, operator):
            yield Running(yard, Services(yard, operator), namespace)


def admit(cluster: Cluster, count: int) -> Admitted:
    with running(cluster, held=True) as now:
        return Raw.run(cluster.layout, lambda raw: _admit(raw, now, count))


async def _admit(raw: Raw, now: Running, count: int) -> Admitted:
    async with now.client() as client:
        await _warm(raw, now)
        names = _names("gang", count - 1)  # with the first one, the cluster is full
        cpu_s, begun = now.services.cpu_s(), time.time()
        watching = asyncio.create_task(_last_admission(client, count))
        await now.apply(raw, names)
        taken_s = await watching - begun
        await _settled(raw, now.namespace, lambda phases: phases["Starting"] == count)
        return Admitted(len(names) / taken_s, (now.services.cpu_s() - cpu_s) / len(names))


async def _warm(raw: Raw, now: Running) -> None:
    """One job, so that connections are made and code is loaded."""
    await now.apply(raw, ["first"])
    await _settled(raw, now.namespace, lambda phases: phases["Starting"] == 1)


async def _last_admission(client: AsyncClient, count: int) -> float:
    """When the yard admitted the last one of so many, by its own clock, which is this machine's."""
    admitted = 0
    async for event in client.watch():
        admitted += event.type == "Admitted"
        if admitted == count:
            return event.time_ns / 1e9
    raise RuntimeError("the yard's events ended")


async def _settled(raw: Raw, namespace: str, holds: Any) -> None:
    """Returns when the resources say so.

    Raises:
        RuntimeError: they do not in time.
    """
    deadline = time.monotonic() + _SETTLE_S
    while True:
        phases = Counter(_phase(each) for each in await _resources(raw, namespace))
        if holds(phases):
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"after {_SETTLE_S} s the resources say {dict(phases)}")
        await asyncio.sleep(1)


async def _resources(raw: Raw, namespace: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await raw.get(RESOURCES.format(namespace)))["items"]
    return found


def _phase(resource: Mapping[str, Any]) -> str:
    return str((resource.get("status") or {}).get("phase", ""))


def _names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def launch(cluster: Cluster, count: int) -> Launched:
    with running(cluster) as now:
        return Raw.run(cluster.layout, lambda raw: _launch(raw, now, count))


async def _launch(raw: Raw, now: Running, count: int) -> Launched:
    await _warm(raw, now)
    memory, requests = now.services.memory_bytes(), await raw.requests()
    first = await raw.get(f"/api/v1/namespaces/{now.namespace}/pods")
    there = sum(each["status"].get("phase") == "Running" for each in first["items"])
    names = _names("gang", count - 1)  # with the first one, the cluster is full
    pods = len(names) * NODES + NODES - there
    taken_s = await until_running(raw, now.namespace, pods, lambda: now.apply(raw, names))
    await _settled(raw, now.namespace, lambda phases: phases["Starting"] == count)
    answered = await raw.requests() - requests
    per_job = (now.services.memory_bytes() - memory) / len(names)
    await now.apply(raw, _names("waits", _WAITING))
    await _settled(raw, now.namespace, lambda phases: phases["Queued"] == _WAITING)
    await _check(raw, now)
    return Launched(len(names) / taken_s, per_job, answered)


async def _check(raw: Raw, now: Running) -> None:
    """Every status says what the yard says, jobs that were admitted have all their pods, and those that wait none.

    Raises:
        RuntimeError: one does not.
    """
    async with now.client() as client:
        said = {job.id: job async for job in client.list(include_owned=True)}
    listed = await raw.get(f"/api/v1/namespaces/{now.namespace}/pods")
    alive = (each for each in listed["items"] if each["status"].get("phase") == "Running")
    pods = Counter(each["metadata"]["labels"]["trainyard.dev/job-id"] for each in alive)
    wrong = []
    for each in await _resources(raw, now.namespace):
        status = each["status"]
        state = scheduler_pb2.JobState.Name(said[status["jobId"]].state).removeprefix("JOB_STATE_").capitalize()
        wanted = 0 if state == "Queued" else NODES
        if (status["phase"], pods[status["jobId"]]) != (state, wanted):
            wrong.append(f"{each['metadata']['name']} says {status['phase']}, is {state}, {pods[status['jobId']]} pods")
    if wrong:
        raise RuntimeError(f"{len(wrong)} resources are wrong: {wrong[:5]}")


def time_raw(cluster: Cluster, count: int) -> tuple[float, Requests]:
    """Jobs a second of a bare client, and the requests that its jobs lead to."""
    with tempfile.TemporaryDirectory(prefix="yard-bench-") as folder, bench_namespace(cluster) as namespace:
        yard = Yard(cluster, namespace, Path(folder), fake_pods())  # for its Jobs: it does not run
        jobs = [yard.raw_job(number, GPU) for number in range(count)]

        async def measure(raw: Raw) -> tuple[float, Requests]:
            before = await raw.requests()
            taken_s = await until_running(raw, namespace, count * NODES, lambda: make_raw(raw, namespace, jobs))
            return count / taken_s, await raw.requests() - before

        return Raw.run(cluster.layout, measure)


def time_kubeflow(cluster: Cluster, count: int) -> float:
    """Jobs a second of Kubeflow's training operator."""
    with (
        tempfile.TemporaryDirectory(prefix="yard-bench-") as folder,
        kubeflow(cluster, Path(folder)),
        bench_namespace(cluster) as namespace,
    ):
        path = PYTORCHJOBS.format(namespace)
        container = {"name": "pytorch", "image": "example/none", "command": ["true"]}
        container["resources"] = {"limits": {"cpu": "150m", "memory": "320Mi", "nvidia.com/gpu": GPU}}  # type: ignore[assignment]
        pod = fake_pods()["spec"] | {"containers": [container], "terminationGracePeriodSeconds": 1}

        async def measure(raw: Raw) -> float:
            jobs = [pytorch_job(name, pod, NODES - 1) for name in _names("peer", count)]
            return await until_running(
                raw, namespace, count * NODES, lambda: raw.all(raw.apply(path, job) for job in jobs)
            )

        return count / Raw.run(cluster.layout, measure)


def without_pods(requests: Requests, bare: Requests) -> Requests:
    """Those that are not about pods.

    Args:
        requests: with the yard.
        bare: with a client that makes as many of the same Jobs and Services.
    """
    kept = Counter({key: count for key, count in requests.items() if not key[1].startswith(_PODS_OWN)})
    return kept - Counter({key: count for key, count in bare.items() if key[1].startswith(_TOLD_OF_PODS)})


def report(held: Admitted, on: Launched, raw: float, bare: Requests, peer: float, count: int) -> int:
    cpu_ms = held.cpu_s_per_job * 1000
    rows = [
        ("admitted a second, launching held back", f"{held.per_s:.1f}"),
        ("processor time of the services, ms a job", f"{cpu_ms:.2f}"),
        ("jobs a second until their pods run: yard", f"{on.per_s:.2f}"),
        ("bare client", f"{raw:.2f}"),
        ("Kubeflow's training operator", f"{peer:.2f}"),
        ("memory of the services, MB an active job", f"{on.bytes_per_job / 1e6:.3f}"),
    ]
    table(f"{count} resources of {NODES} pods", ("", ""), rows)
    counted = without_pods(on.requests, bare)
    table(
        "requests to the API server a job, the control plane's too",
        ("", "yard", "bare client", "not the pods' own"),
        [
            (" ".join(key), *(f"{each[key] / count:.2f}" for each in (on.requests, bare, counted)))
            for key, _ in on.requests.most_common(16)
        ],
    )
    per_job = counted.total() / count
    published = "Kueue, published"
    return conclude(
        "cluster_admission",
        [
            Bar(
                name="admissions",
                ours=held.per_s,
                peer=KUEUE_PER_S,
                peer_name=published,
                unit="1/s",
                bar=KUEUE_PER_S,
                higher_is_better=True,
            ),
            Bar(name="processor time a decision", ours=cpu_ms, peer=10, peer_name="the limit", unit="ms", bar=10),
            Bar(
                name="jobs whose pods run",
                ours=on.per_s,
                peer=raw,
                peer_name="bare client",
                unit="1/s",
                bar=raw / 2,
                higher_is_better=True,
            ),
            Bar(
                name="the same, beside Kubeflow",
                ours=on.per_s,
                peer=peer,
                peer_name="training operator 1.8.1",
                unit="1/s",
                bar=peer,
                higher_is_better=True,
            ),
            Bar(
                name="memory an active job",
                ours=on.bytes_per_job / 1e6,
                peer=0.5,
                peer_name="the limit",
                unit="MB",
                bar=0.5,
            ),
            Bar(name="requests a job", ours=per_job, peer=20, peer_name="the limit", unit="1", bar=20),
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--peer-jobs", type=int, default=300, help="of Kubeflow's operator, which takes minutes")
    arguments = parser.parse_args()
    count = arguments.jobs
    gpus_per_node = 8
    with bench_cluster(max(1, count * NODES * GPU // gpus_per_node)) as cluster:
        resources.install(cluster)
        progress("launching held back")
        held = admit(cluster, count)
        progress("bare client")
        raw, bare = time_raw(cluster, count)
        progress("launching on")
        on = launch(cluster, count)
        progress("Kubeflow's training operator")
        peer = time_kubeflow(cluster, min(count, arguments.peer_jobs))
        progress("")
    return report(held, on, raw, bare, peer, count)


if __name__ == "__main__":
    sys.exit(main())
