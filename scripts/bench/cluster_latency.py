"""From `kubectl apply` of a job that does nothing to its first line in the container's log, on a real kubelet.

Beside it `kubectl create job` of the same image and command, and Kubeflow's training operator, by turns. The yard is
idle; queueing, admission and the durable record are in its time. The line's time is that of the container runtime.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from _cluster import bench_cluster, bench_namespace
from _cluster_kubeflow import kubeflow, pytorch_job
from _cluster_raw import RESOURCES, Object, Raw
from _cluster_yard import Operator, Yard, started
from _harness import Bar, conclude, interleave, spread, table
from trainyard.client import Client

from scripts.testbed import images
from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.cluster.images import BUSYBOX
from tests.cluster import resources

OVER_MS = 300
COMMAND = ["sh", "-c", "echo first-line; sleep 2"]
FIRST_LINE = "first line"
_PATIENCE_S = 240
_LOOK_S = 0.2


@dataclass(slots=True)
class Trace:
    """When what was seen first, in milliseconds after the command began."""

    begun: float = field(default_factory=time.time)
    marks: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str, at: float | None = None) -> None:
        self.marks.setdefault(name, ((at or time.time()) - self.begun) * 1000)

    @property
    def total(self) -> float:
        return self.marks[FIRST_LINE]


class Bench:
    """One namespace, in which all of them run their jobs."""

    def __init__(self, cluster: Cluster, namespace: str, client: Client, folder: Path) -> None:
        self._cluster, self._namespace, self._client, self._folder = cluster, namespace, client, folder
        self._count = 0

    def yard(self) -> Trace:
        name = self._next("ours")
        spec = {"runtime": "process", "command": COMMAND, "image": BUSYBOX, "gracePeriod": "1s"}
        spec |= {"resources": {"cpu": "100m", "memory": "64Mi"}}
        head = {"apiVersion": "trainyard.dev/v1alpha1", "kind": "TrainingJob"}
        trace = self._apply(head | {"metadata": {"name": name}, "spec": spec})
        (job,) = self._client.list(name_contains=name)
        for event in self._client.events(job.id):
            trace.mark(f"yard: {event.type}", event.time_ns / 1e9)
            if event.type == "Succeeded":
                break
        return trace

    def plain(self) -> Trace:
        return self._time("create", "job", self._next("plain"), f"--image={BUSYBOX}", "--", *COMMAND)

    def kubeflow(self) -> Trace:
        container = {"name": "pytorch", "image": BUSYBOX, "command": COMMAND}
        return self._apply(pytorch_job(self._next("peer"), {"containers": [container]}, 0))

    def _next(self, kind: str) -> str:
        self._count += 1
        return f"{kind}-{self._count}"

    def _apply(self, document: Mapping[str, Any]) -> Trace:
        file = self._folder / "job.json"
        file.write_text(json.dumps(document))
        return self._time("apply", f"--filename={file}")

    def _time(self, *arguments: str) -> Trace:
        """Runs kubectl, and returns when the pod that comes of it is over."""
        return Raw.run(self._cluster.layout, lambda raw: self._traced(raw, arguments))

    async def _traced(self, raw: Raw, arguments: Sequence[str]) -> Trace:
        core, batch = f"/api/v1/namespaces/{self._namespace}/pods", f"/apis/batch/v1/namespaces/{self._namespace}/jobs"
        paths = {RESOURCES.format(self._namespace): _of_resource, batch: _of_job, core: _of_pod}
        lists = [await raw.get(path) for path in paths]
        before = {each["metadata"]["uid"] for found in lists for each in found["items"]}  # of earlier rounds
        trace, pods, over = Trace(), asyncio.Queue[str](), asyncio.Event()
        watches = [
            asyncio.create_task(
                _follow(raw, path, found["metadata"]["resourceVersion"], marks, trace, pods, over, before)
            )
            for (path, marks), found in zip(paths.items(), lists, strict=True)
        ]
        try:
            trace.begun = time.time()
            await asyncio.to_thread(self._cluster.kubectl, f"--namespace={self._namespace}", *arguments)
            trace.mark("kubectl is back")
            pod = await asyncio.wait_for(pods.get(), _PATIENCE_S)
            trace.mark(FIRST_LINE, await _first_line(raw, f"{core}/{pod}"))
            await asyncio.wait_for(over.wait(), _PATIENCE_S)
        finally:
            for watch in watches:
                watch.cancel()
        return trace


async def _follow(
    raw: Raw,
    path: str,
    version: str,
    marks: Callable[[Object], Iterator[str]],
    trace: Trace,
    pods: asyncio.Queue[str],
    over: asyncio.Event,
    before: Set[str],
) -> None:
    async for event in raw.watch(path, version):
        if event["type"] == "BOOKMARK" or event["object"]["metadata"]["uid"] in before:
            continue
        for name in marks(event["object"]):
            if name == "worker's container runs" and name not in trace.marks:
                pods.put_nowait(event["object"]["metadata"]["name"])
            if name == "pod over":
                over.set()
            trace.mark(name)


def _of_resource(resource: Object) -> Iterator[str]:
    yield "resource is there"
    phase = (resource.get("status") or {}).get("phase")
    if phase in ("Queued", "Starting", "Running"):
        yield f"status says {phase}"


def _of_job(_: Object) -> Iterator[str]:
    yield "Job is there"


def _of_pod(pod: Object) -> Iterator[str]:
    yield "pod is there"
    status = pod.get("status", {})
    if pod["spec"].get("nodeName"):
        yield "pod has a node"
    for each in status.get("initContainerStatuses", ()):
        if "terminated" in each["state"]:
            yield "agent is copied"
    for each in status.get("containerStatuses", ()):
        if "waiting" not in each["state"]:
            yield "worker's container runs"
    conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
    if status.get("phase") in ("Succeeded", "Failed") and conditions.get("PodReadyToStartContainers") == "False":
        yield "pod over"  # its sandbox too: taking it down is not to be in the next one's time


async def _first_line(raw: Raw, pod: str) -> float:
    """When the container runtime had it."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(RuntimeError):  # there is no log yet
            for line in (await raw.text(f"{pod}/log?timestamps=true")).splitlines():
                at, _, said = line.partition(" ")
                if said.endswith("first-line"):
                    return datetime.fromisoformat(at).timestamp()
        await asyncio.sleep(_LOOK_S)
    raise RuntimeError(f"{pod} printed nothing")


def measure(cluster: Cluster, rounds: int) -> dict[str, list[Trace]]:
    resources.install(cluster)
    if any(images.reference("agent") not in known for known in cluster.images().values()):
        cluster.load_image(images.archive("agent"))
    with (
        tempfile.TemporaryDirectory(prefix="yard-bench-") as home,
        kubeflow(cluster, Path(home) / "kubeflow"),
        bench_namespace(cluster) as namespace,
    ):
        folder = Path(home)
        agent = {"KUBERNETES_AGENT_IMAGE": images.reference("agent")}
        yard = Yard(cluster, namespace, folder / "yard", {}, **agent)
        with started(yard, Operator(yard, folder / "operator")), yard.client() as client:
            bench = Bench(cluster, namespace, client, folder)
            cases = {"yard": bench.yard, "kubectl create job": bench.plain, "Kubeflow": bench.kubeflow}
            return interleave(cases, rounds)


def report(results: Mapping[str, Sequence[Trace]]) -> int:
    medians = {name: statistics.median(each.total for each in traces) for name, traces in results.items()}
    rows = []
    for name, traces in results.items():
        figures = [*spread([each.total for each in traces]), medians[name] - medians["kubectl create job"]]
        rows.append((name, *(f"{value:.0f}" for value in figures)))
    table("to the first line in the container's log, ms", ("", "median", "min", "max", "over plain"), rows)
    for name, traces in results.items():
        _show_marks(name, traces)
    over = medians["yard"] - medians["kubectl create job"]
    peer = medians["Kubeflow"] - medians["kubectl create job"]
    return conclude(
        "cluster_latency",
        [Bar(name="yard over plain", ours=over, peer=peer, peer_name="Kubeflow", unit="ms", bar=OVER_MS)],
    )


def _show_marks(name: str, traces: Sequence[Trace]) -> None:
    """Medians, in their order; what a watch told is as late as its telling."""
    names = {mark for each in traces for mark in each.marks}
    median = {mark: statistics.median(each.marks[mark] for each in traces if mark in each.marks) for mark in names}
    ordered = sorted(median, key=lambda mark: median[mark])
    rows, before = [], 0.0
    for mark in ordered:
        rows.append((mark, f"{median[mark]:.0f}", f"+{median[mark] - before:.0f}"))
        before = median[mark]
    table(f"{name}: when it was seen, ms", ("", "at", "after the one before"), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with bench_cluster() as cluster:
        return report(measure(cluster, rounds))


if __name__ == "__main__":
    sys.exit(main())
