"""Pods go where the yard planned, no more than fit, and a pool grows from nothing.

Fake nodes of kwok stand for machines: what is tested is which pods there are and where, not that they train.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from trainyard.client import Client, JobHandle
from trainyard.errors import YardError
from trainyard_protos.v1 import scheduler_pb2 as s

from scripts.testbed.cluster import binaries, kwok, locks, system
from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S
from tests.cluster.conftest import in_a_namespace
from tests.cluster.yards import ClusterYard
from tests.conftest import wait_until
from tests.jobs import document

SET = f"set-{secrets.token_hex(4)}"
LABEL, KIND = "trainyard.test/set", "trainyard.test/kind"
LARGE = {
    "name": "large",
    "max": 2,
    "resources": {"cpu": "1200m", "memory": "2Gi"},
    "labels": {LABEL: SET, KIND: "large"},
    "taints": [{"key": "large"}],
}
ON_LARGE = {"nodeSelector": {KIND: "large"}, "tolerations": [{"key": "large", "operator": "Exists"}]}


@pytest.fixture(scope="module")
def machines(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster in which kwok runs; the fake nodes of this file are gone afterwards."""
    system.get((binaries.kwok,))
    with locks.sharing(cluster.layout), locks.changing(cluster.layout):
        kwok.start(cluster.control)
    yield cluster
    cluster.kubectl("delete", "nodes", f"--selector={LABEL}={SET}", "--wait=false")


@pytest.fixture(scope="module")
def yard(machines: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterYard]:
    """A yard whose pool is this file's nodes, and which may grow by two."""
    add(machines, "small", cpu="2")
    template = {
        "spec": {
            "nodeSelector": {LABEL: SET},
            "tolerations": [{"key": kwok.TAINT, "operator": "Exists"}],
        }
    }
    file = tmp_path_factory.mktemp("template") / "pod.yaml"
    file.write_text(json.dumps(template))
    settings = {
        "KUBERNETES_POD_TEMPLATE": str(file),
        "KUBERNETES_MACHINE_KINDS": json.dumps([LARGE]),
        "KUBERNETES_UNSCHEDULABLE_PATIENCE_S": "1",  # so that no test waits for a minute
    }
    with locks.sharing(machines.layout):
        running = in_a_namespace(machines, tmp_path_factory, **settings)
        yard = next(running)
    yield yard
    with locks.sharing(machines.layout):
        for _ in running:
            pass


@pytest.fixture
def client(yard: ClusterYard) -> Iterator[Client]:
    with yard.client() as client:
        wait_until(lambda: announced(client), "the pool")
        yield client
        yard.cancel_all()


def announced(client: Client) -> bool:
    try:
        return any(pool.machines for pool in client.pools())
    except YardError:
        return False


_INFO = (
    *("architecture", "bootID", "kernelVersion", "kubeProxyVersion", "machineID", "operatingSystem", "osImage"),
    "systemUUID",
)


def add(cluster: Cluster, name: str, *taints: dict[str, str], cpu: str, **labels: str) -> None:
    """Adds a fake node of this file's set."""
    [node] = kwok.nodes(1)["items"]
    full = f"{SET}-{name}"
    amounts = {"cpu": cpu, "memory": "4Gi", "pods": "110", "ephemeral-storage": "1Ti"}
    node["metadata"] |= {"name": full, "labels": {LABEL: SET, "kubernetes.io/hostname": full} | labels}
    node["spec"]["taints"] += taints
    versions = {"kubeletVersion": "v1.36.3", "containerRuntimeVersion": "containerd://2.4.2"}  # as the real nodes
    unknown = dict.fromkeys(_INFO, "")
    node["status"] = {"allocatable": amounts, "capacity": amounts, "nodeInfo": unknown | versions}
    cluster.apply(node)


def add_large(cluster: Cluster, name: str) -> None:
    add(cluster, name, {"key": "large", "effect": "NoSchedule"}, cpu="1200m", **{KIND: "large"})


def pods(yard: ClusterYard, job: JobHandle) -> list[dict[str, Any]]:
    return yard.get("pods", **{"job-id": job.id})


def nodes_of(yard: ClusterYard, job: JobHandle) -> list[str]:
    """Where the pods of a job are, without those that have no node."""
    found = [pod["spec"].get("nodeName", "").removeprefix(f"{SET}-") for pod in pods(yard, job)]
    return sorted(name for name in found if name)


def planned(job: JobHandle) -> list[str]:
    return [each.machine.removeprefix(f"{SET}-") for each in job.status().attempts[-1].placements]


def test_of_twenty_small_jobs_as_many_are_admitted_as_fit_with_their_agents(yard: ClusterYard, client: Client) -> None:
    small = {"cpu": "100m", "memory": "64Mi"}
    jobs = [client.submit(document(["true"], name=f"small-{i}", resources=small)) for i in range(20)]

    def placed() -> list[dict[str, Any]]:
        return [pod for pod in yard.get("pods") if pod["spec"].get("nodeName")]

    wait_until(lambda: len(placed()) == 13, "13 pods on the machine of 2 cores", PATIENCE_S)
    assert len(yard.get("pods")) == 13, "no pod finds no room"
    states = [job.status().state for job in jobs]
    assert states == [s.JOB_STATE_STARTING] * 13 + [s.JOB_STATE_QUEUED] * 7
    assert "for the agent of each" in yard.yard("explain", jobs[13].id).stdout


def test_a_pool_grows_from_nothing_and_a_gang_waits_for_all_of_its_machines(
    machines: Cluster, yard: ClusterYard, client: Client
) -> None:
    size = {"cpu": 1, "memory": "512Mi"}
    gang = client.submit(document(["true"], name="gang", nodes=2, resources=size, kubernetes=ON_LARGE))
    other = client.submit(document(["true"], name="other", resources=size))
    wait_until(lambda: nodes_of(yard, other) == ["small"], "the later job on the machine that is there", PATIENCE_S)
    wait_until(lambda: len(pods(yard, gang)) == 2, "pods that wait", PATIENCE_S)
    explained = yard.yard("explain", gang.id).stdout
    assert "WaitingForMachines" in explained
    assert "kind 'large'; 15 min left" in " ".join(explained.split())
    add_large(machines, "l1")
    wait_until(lambda: "l1" in planned(gang), "the first machine to be reported", PATIENCE_S)
    third = client.submit(document(["true"], name="third", resources=size, kubernetes=ON_LARGE))
    add_large(machines, "l2")
    wait_until(lambda: nodes_of(yard, gang) == ["l1", "l2"], "both machines", PATIENCE_S)
    wait_until(lambda: sorted(planned(gang)) == ["l1", "l2"], "both to be reported", PATIENCE_S)
    assert gang.status().pending.reason == ""
    assert third.status().state == s.JOB_STATE_QUEUED, "no more is admitted than there may ever be"
    shown = yard.yard("status", gang.id).stdout
    assert f"{SET}-l1" in shown
    assert f"{SET}-l2" in shown


def test_each_node_of_a_gang_goes_to_its_planned_machine(machines: Cluster, yard: ClusterYard, client: Client) -> None:
    add(machines, "medium", cpu="1500m")
    wait_until(lambda: any(each.name.endswith("medium") for each in client.pools()[0].machines), "it to be announced")
    size = {"cpu": "600m", "memory": "512Mi"}
    gang = client.submit(document(["true"], name="gang", nodes=5, resources=size))
    wait_until(lambda: len(nodes_of(yard, gang)) == 5, "all pods on machines", PATIENCE_S)
    assert nodes_of(yard, gang) == sorted(planned(gang)) == ["medium"] * 2 + ["small"] * 3
    by_index = {
        int(pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]): pod for pod in pods(yard, gang)
    }
    assert [by_index[node]["spec"]["nodeName"].removeprefix(f"{SET}-") for node in range(5)] == planned(gang)


def test_a_job_that_its_machine_does_not_take_goes_to_another_one_without_a_retry(
    machines: Cluster, yard: ClusterYard, client: Client
) -> None:
    """Its volume is elsewhere, which only the cluster knows."""
    add(machines, "medium", cpu="1500m")
    wait_until(lambda: any(each.name.endswith("medium") for each in client.pools()[0].machines), "it to be announced")
    name = f"{SET}-data"
    expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": [f"{SET}-small"]}
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    volume = {
        **spec,
        "capacity": {"storage": "1Gi"},
        "local": {"path": "/data"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}},
    }
    claim = spec | {"volumeName": name, "resources": {"requests": {"storage": "1Gi"}}}
    machines.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "namespace": yard.namespace},
            "spec": claim,
        },
    )
    try:
        mounted = {"name": "data", "mountPath": "/data", "persistentVolumeClaim": "data"}
        size = {"cpu": "600m", "memory": "512Mi"}
        job = client.submit(document(["true"], resources=size, kubernetes={"volumes": [mounted]}))
        wait_until(lambda: nodes_of(yard, job) == ["small"], "its pod where its volume is", PATIENCE_S)
        status = job.status()
        assert [each.exit.reason for each in status.attempts[:-1]] == ["Unschedulable"]
        assert (status.retries_used, status.free_retries_used) == (0, 0)
    finally:
        machines.kubectl("delete", "persistentvolume", name, "--wait=false")
