"""Machines that are taken out of use while jobs run on them: drained for maintenance, or short of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from trainyard.client import JobHandle

from scripts.testbed.cluster.cluster import Cluster
from tests.cluster.yards import ClusterYard
from tests.conftest import wait_until
from tests.jobs import document, output, python

WAIT_S = 240

# Its only checkpoint is the one that it writes when it is told to end.
COUNTING = """
    import signal, sys, time
    from pathlib import Path
    folder = Path("checkpoints")
    folder.mkdir(exist_ok=True)
    done = max((int(file.stem) for file in folder.glob("*.bin")), default=0)
    print("from", done, flush=True)

    def save(*_):
        (folder / ".draft").write_bytes(b"%d" % done)
        (folder / ".draft").rename(folder / f"{done}.bin")
        print("saved", done, flush=True)
        sys.exit(143)

    signal.signal(signal.SIGTERM, save)
    resumed = done > 0
    while not resumed:
        done += 1
        time.sleep(0.2)
"""


def counting(**spec: object) -> dict[str, object]:
    """Counts until it is told to end, then again from there, and is over."""
    checkpoints = {"path": "checkpoints", "pattern": "{step}.bin"}
    return document(python(COUNTING), checkpoints=checkpoints, gracePeriod="5s", **spec)


def running(job: JobHandle, nodes: int = 1) -> None:
    wait_until(lambda: output(job).count("from 0") == nodes, f"{job.name} to count", WAIT_S)


def machines(yard: ClusterYard, job: JobHandle) -> list[str]:
    """Where the pods of a job are, by node."""
    pods = yard.get("pods", **{"job-id": job.id})
    index = "batch.kubernetes.io/job-completion-index"
    return [pod["spec"]["nodeName"] for pod in sorted(pods, key=lambda pod: int(pod["metadata"]["labels"][index]))]


def resumed_where_it_was_told_to_end(job: JobHandle) -> None:
    [saved] = [line.split()[1] for line in output(job, 0) if line.startswith("saved")]
    assert output(job, 0)[-1] == f"from {saved}"


@contextmanager
def drained(cluster: Cluster, machine: str) -> Iterator[None]:
    """`kubectl drain`, as the guide has it; `kubectl uncordon` afterwards."""
    cluster.kubectl("drain", machine, "--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={WAIT_S}s")
    try:
        yield
    finally:
        cluster.kubectl("uncordon", machine)


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_drained_machine_hands_its_jobs_to_the_others_with_their_last_checkpoint(
    own_yard: ClusterYard, cluster_alone: Cluster, nodes: int
) -> None:
    with own_yard.client() as client:
        job = client.submit(counting(nodes=nodes, kubernetes={"topology": "spread"}))
        running(job, nodes)
        machine, *_ = machines(own_yard, job)
        with drained(cluster_alone, machine):
            status = job.wait(WAIT_S)
            [first, second] = status.attempts
            assert (first.exit.reason, second.exit.reason) == ("Evicted", "Completed")
            assert "its node is drained" in first.exit.message
            assert status.free_retries_used == 1
        resumed_where_it_was_told_to_end(job)
        back = document(["true"], name="back", kubernetes={"nodeSelector": {"kubernetes.io/hostname": machine}})
        assert client.submit(back).wait(WAIT_S).reason == "Completed"


@contextmanager
def kubelet_with(cluster: Cluster, machine: str, **settings: object) -> Iterator[None]:
    """A machine whose kubelet was started again with other settings. Its containers go on meanwhile."""
    cluster.restart_kubelet(machine, **settings)
    try:
        yield
    finally:
        cluster.restart_kubelet(machine, evictionPressureTransitionPeriod="1s")
        cluster.kubectl("wait", "--for=condition=MemoryPressure=false", f"node/{machine}", f"--timeout={WAIT_S}s")
        cluster.restart_kubelet(machine)


SHORT_OF_MEMORY = {
    "evictionSoft": {"memory.available": "99%"},
    "evictionSoftGracePeriod": {"memory.available": "1s"},
    "evictionMaxPodGracePeriod": 60,
}
LESS_ROOM = {"evictionHard": {"memory.available": "99%"}}  # is kept free of pods


@pytest.mark.exhaustive  # the kubelet looks for pressure every ten seconds
@pytest.mark.parametrize(
    ("settings", "why"),
    [(SHORT_OF_MEMORY, "low on resource: memory"), (LESS_ROOM, "its node ended it: OutOfmemory")],
    ids=["short of memory", "less room after a restart"],
)
def test_a_machine_whose_kubelet_throws_pods_out_has_its_jobs_go_on_elsewhere(
    own_yard: ClusterYard, cluster_alone: Cluster, settings: dict[str, object], why: str
) -> None:
    with own_yard.client() as client:
        job = client.submit(counting())
        running(job)
        [machine] = machines(own_yard, job)
        with kubelet_with(cluster_alone, machine, **settings):
            status = job.wait(WAIT_S)
        [first, second] = status.attempts
        assert (first.exit.reason, second.exit.reason) == ("Evicted", "Completed")
        assert why in first.exit.message
        assert status.free_retries_used == 1
        resumed_where_it_was_told_to_end(job)


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_worker_that_its_machine_tells_to_end_is_no_end_of_the_job(own_yard: ClusterYard, nodes: int) -> None:
    """As when a machine of a spot market goes down, and nobody tells the cluster."""
    with own_yard.client() as client:
        job = client.submit(counting(nodes=nodes))
        running(job, nodes)
        [pod, *_] = own_yard.get("pods", **{"job-id": job.id})
        own_yard.kubectl("exec", pod["metadata"]["name"], "--", "sh", "-c", "kill -TERM 1")
        status = job.wait(WAIT_S)
        assert [each.exit.reason for each in status.attempts] == ["Evicted", "Completed"]
        assert "may be going down" in status.attempts[0].exit.message
        resumed_where_it_was_told_to_end(job)
