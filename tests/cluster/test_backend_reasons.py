"""What takes pods away and what keeps them from running, each brought about for real: the reason, and what to do."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from trainyard.client import Client, JobHandle

from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.cluster.images import BUSYBOX
from tests.cluster.conftest import in_a_namespace
from tests.cluster.resources import OperatorProcess, Resources
from tests.cluster.resources import in_a_namespace as resources_in_a_namespace
from tests.cluster.yards import ClusterYard
from tests.conftest import wait_until
from tests.jobs import document, output, python, reasons

WAIT_S = 240
GPU = "trainyard.test/gpu"
FOREVER = python("import signal; print('here', flush=True); signal.pause()")

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def client(yard_on_cluster: ClusterYard) -> Iterator[Client]:
    with yard_on_cluster.client() as client:
        yield client
    yard_on_cluster.cancel_all()


def remark(job: JobHandle, reason: str) -> str:
    """The first event of the job with this reason."""

    def found() -> list[str]:
        return [event.message for event in job.events() if event.reason == reason]

    wait_until(found, f"{reason} of {job.name}", WAIT_S)
    return found()[0]


def why_first_ended(job: JobHandle) -> str:
    """How the first attempt ended, once there is a second."""
    wait_until(lambda: job.status().attempt == 2, "a second attempt", WAIT_S)
    exit = job.status().attempts[0].exit
    return f"{exit.reason}: {exit.message}"


def begun(job: JobHandle) -> None:
    wait_until(lambda: "here" in output(job), f"{job.name} to print", WAIT_S)


def pod_of(yard: ClusterYard, job: JobHandle) -> dict:
    [pod] = yard.get("pods", **{"job-id": job.id})
    return pod


def test_an_evicted_pod_is_told_and_the_job_is_tried_again_for_free(
    yard_on_cluster: ClusterYard, client: Client
) -> None:
    """By the same request as `kubectl drain` makes."""
    job = client.submit(document(FOREVER, gracePeriod="1s"))
    begun(job)
    metadata = {"name": pod_of(yard_on_cluster, job)["metadata"]["name"], "namespace": yard_on_cluster.namespace}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/eviction"
    yard_on_cluster.cluster.kubectl("create", "--raw", path, "--filename=-", input=json.dumps(eviction))
    why = why_first_ended(job)
    assert why.startswith("Evicted: ")
    assert "drained" in why
    assert job.status().free_retries_used == 1


@pytest.mark.exhaustive  # the kubelet measures volumes once a minute
def test_a_pod_that_stores_more_than_it_may_is_told_which_limit(yard_on_cluster: ClusterYard, client: Client) -> None:
    volume = {"name": "scratch", "mountPath": "/scratch", "emptyDir": {"sizeLimit": "1Mi"}}
    code = """
        import signal
        open("/scratch/file", "wb").write(bytes(8 << 20))
        signal.pause()
    """
    job = client.submit(document(python(code), kubernetes={"volumes": [volume]}, gracePeriod="1s"))
    why = why_first_ended(job)
    assert why.startswith("Evicted: ")
    assert 'EmptyDir volume "scratch" exceeds the limit "1048576"' in why
    assert "raise the sizeLimit" in why


def test_an_image_name_that_is_none_ends_the_attempt_at_once(client: Client) -> None:
    job = client.submit(document(["true"], image=f"localhost/none/such:{'x' * 200}"))  # tags have at most 128
    status = job.wait(WAIT_S, check=False)
    assert status.reason == "ImageUnavailable"
    assert "InvalidImageName" in status.message
    assert "check spec.image" in status.message


@pytest.fixture(scope="module")
def _operated(
    yard_on_cluster: ClusterYard, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OperatorProcess, Resources]]:
    yard = yard_on_cluster
    with resources_in_a_namespace(cluster) as resources:
        folder = tmp_path_factory.mktemp("operator")
        operator = OperatorProcess(cluster, resources.namespace, yard.folder, folder, {}, yard.ca_file)
        try:
            yield operator, resources
            operator.start()
            for name in resources.names():  # nobody lets go of them afterwards
                resources.delete(name)
        finally:
            operator.stop()


@pytest.fixture
def operator(_operated: tuple[OperatorProcess, Resources]) -> OperatorProcess:
    """The operator of the module, which runs."""
    _operated[0].start()
    return _operated[0]


@pytest.fixture
def resources(_operated: tuple[OperatorProcess, Resources]) -> Resources:
    return _operated[1]


MISSING = {"volumes": [{"name": "v", "mountPath": "/v", "configMap": "no-such-settings"}]}


def job_of(resources: Resources, client: Client, name: str) -> JobHandle:
    return client.job(resources.until(name, lambda said: said.get("jobId"), "to have a job")["jobId"])


def test_a_resource_says_why_its_pods_do_not_run_when_its_operator_was_away_meanwhile(
    client: Client, operator: OperatorProcess, resources: Resources
) -> None:
    resources.apply(document(["true"], "stuck", kubernetes=MISSING))
    job = job_of(resources, client, "stuck")
    operator.kill()
    remark(job, "VolumeUnavailable")
    operator.start()
    status = resources.until("stuck", lambda said: said.get("reason"), "to say why it does not run")
    assert (status["phase"], status["reason"]) == ("Starting", "VolumeUnavailable")
    assert "no-such-settings" in status["message"]


def test_annotations_of_a_resource_reach_its_pods_and_those_of_kubernetes_and_the_yard_do_not(
    yard_on_cluster: ClusterYard, client: Client, operator: OperatorProcess, resources: Resources
) -> None:
    """kubectl apply itself adds one of Kubernetes, and the operator one of the yard."""
    given = {"example.com/cost-center": "a 7", "kubernetes.io/description": "mine"}
    resources.apply(document(["true"], "annotated", annotations=given, kubernetes=MISSING))
    job = job_of(resources, client, "annotated")
    wait_until(lambda: yard_on_cluster.get("pods", **{"job-id": job.id}), "its pod", WAIT_S)
    passed_on = pod_of(yard_on_cluster, job)["metadata"]["annotations"]
    written = resources.get("annotated")["metadata"]["annotations"]
    assert passed_on.items() & written.items() == {("example.com/cost-center", "a 7")}


def test_volumes_that_are_not_there_are_told_by_name(yard_on_cluster: ClusterYard, client: Client) -> None:
    missing = {
        "configMap": client.submit(
            document(
                ["true"], kubernetes={"volumes": [{"name": "v", "mountPath": "/v", "configMap": "no-such-settings"}]}
            )
        ),
        "claim": client.submit(
            document(
                ["true"],
                kubernetes={"volumes": [{"name": "v", "mountPath": "/v", "persistentVolumeClaim": "no-such-claim"}]},
            )
        ),
    }
    assert "no-such-settings" in remark(missing["configMap"], "VolumeUnavailable")
    said = remark(missing["claim"], "VolumeUnavailable")
    assert "no-such-claim" in said
    assert "spec.kubernetes.volumes" in said
    assert "VolumeUnavailable" in yard_on_cluster.yard("status", missing["claim"].id).stdout


def test_of_jobs_that_ended_in_every_way_nothing_is_left_but_the_failed_pod_and_its_job(
    yard_on_cluster: ClusterYard, client: Client
) -> None:
    before = everything(yard_on_cluster)
    done, failed, cancelled, killed, deleted = (
        client.submit(document(command, name=name, nodes=nodes, gracePeriod="1s"))
        for name, command, nodes in (
            ("done", ["true"], 2),
            ("failed", ["false"], 1),
            ("cancelled", FOREVER, 2),
            ("killed", FOREVER, 1),
            ("deleted", FOREVER, 1),
        )
    )
    for job in (cancelled, killed, deleted):
        begun(job)
    cancelled.cancel()
    for kind, job in (("pods", killed), ("jobs", deleted)):
        yard_on_cluster.kubectl("delete", kind, f"--selector=trainyard.dev/job-id={job.id}", "--wait=false")
        wait_until(lambda job=job: job.status().attempt == 2, "a second attempt", WAIT_S)
        job.cancel()
    assert [job.wait(WAIT_S, check=False).reason for job in (done, failed, cancelled, killed, deleted)] == [
        *("Completed", "WorkerFailed"),
        *("Cancelled", "Cancelled", "Cancelled"),
    ]
    wait_until(
        lambda: left(yard_on_cluster, before) == {"job.batch", "pod"}, f"the end of {left(yard_on_cluster, before)}"
    )


def left(yard: ClusterYard, before: set[str]) -> set[str]:
    """What is left, and of the failed job its kinds alone: they are kept for a time."""
    found = everything(yard) - before
    return {name.partition("/failed-")[0] for name in found}


def everything(yard: ClusterYard) -> set[str]:
    """The names of all objects of the namespace but events, of whatever kind."""
    kinds = yard.kubectl("api-resources", "--namespaced", "--verbs=list", "--output=name").split()
    kinds = [kind for kind in kinds if not kind.startswith("events")]
    return set(yard.kubectl("get", ",".join(kinds), "--output=name", "--ignore-not-found").split())


@pytest.fixture
def machine_with_gpu(cluster: Cluster) -> Iterator[str]:
    """A machine that says it has one GPU, of a kind that no other test asks for."""
    name = cluster.nodes[0]
    where = f"/status/capacity/{GPU.replace('/', '~1')}"
    patch = ["patch", "node", name, "--subresource=status", "--type=json"]
    cluster.kubectl(*patch, f'--patch=[{{"op": "add", "path": "{where}", "value": "1"}}]')
    yield name
    cluster.kubectl(*patch, f'--patch=[{{"op": "remove", "path": "{where}"}}]')


@pytest.fixture
def gpu_yard(
    cluster: Cluster, machine_with_gpu: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterYard]:
    yield from in_a_namespace(cluster, tmp_path_factory, KUBERNETES_GPU_RESOURCE=GPU, RENEW_S="1")


@contextmanager
def important_pod(yard: ClusterYard) -> Iterator[None]:
    """A pod of somebody else that asks for the GPU and may take it from others."""
    name = f"important-{secrets.token_hex(4)}"
    important = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": 1000,
    }
    container = {"name": "main", "image": BUSYBOX, "command": ["sleep", "3600"], "resources": {"limits": {GPU: "1"}}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"priorityClassName": name, "terminationGracePeriodSeconds": 0, "containers": [container]},
    }
    yard.kubectl("apply", "--filename=-", input=json.dumps(important))
    yard.kubectl("apply", "--filename=-", input=json.dumps(pod))
    try:
        yield
    finally:  # the class belongs to the whole cluster
        yard.kubectl("delete", "pod", name)
        yard.kubectl("delete", "priorityclass", name)


def test_gpus_are_a_resource_of_pods_and_of_others_too(gpu_yard: ClusterYard, machine_with_gpu: str) -> None:
    """A job gets one, loses it to a more important pod, waits while that has it, and goes on. Two are too many."""
    with gpu_yard.client() as client:
        one = {"cpu": "100m", "memory": "128Mi", "gpu": 1}
        job = client.submit(document(FOREVER, resources=one, gracePeriod="1s"))
        begun(job)
        pod = pod_of(gpu_yard, job)
        assert pod["spec"]["nodeName"] == machine_with_gpu
        assert pod["spec"]["containers"][0]["resources"]["limits"][GPU] == "1"
        greedy = client.submit(document(["true"], name="greedy", resources=one | {"gpu": 2}))
        wait_until(lambda: "too much gpu for one node" in greedy.status().pending.message, "why it waits", WAIT_S)
        with important_pod(gpu_yard):
            wait_until(lambda: "Evicted" in reasons(job), "the end of the first attempt", WAIT_S)
            assert "more important pods needed its place" in job.status().attempts[0].exit.message
            wait_until(lambda: job.status().pending.reason == "RoomHeldByOthers", "the job to wait for a gpu", WAIT_S)
            assert f"1 gpu of '{machine_with_gpu}'" in job.status().pending.message
            assert greedy.status().pending.never_fits
        wait_until(lambda: job.status().attempt == 2 and output(job).count("here") == 2, "a second attempt", WAIT_S)
