"""An installation by the chart: it answers, an upgrade does not touch what runs, and nothing but data is left of it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from trainyard.client import JobHandle

from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S
from tests.cluster.release import Release, small_job
from tests.conftest import wait_until
from tests.jobs import output

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(8 * PATIENCE_S)]

OF_A_SECRET = [{"name": "KEY", "from": {"secret": {"name": "hub", "key": "k"}}}]
WAITING = """
    import os, time
    print("begun", flush=True)
    while not os.path.exists("/tmp/go"):
        time.sleep(0.1)
    print("done", flush=True)
"""
SECRETS = {
    f"yard-trainyard-{name}"
    for name in ("attempt-key", "authority", "operator-token", "redis", "scrape-token", "tls", "token")
}
KINDS = (
    "all,configmaps,secrets,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets,"
    "persistentvolumeclaims"
)


@pytest.fixture
def release(cluster: Cluster, cluster_namespace: str, tmp_path: Path) -> Iterator[Release]:
    """One that is not installed yet, with volumes for it."""
    tmp_path.chmod(0o755)
    found = Release(cluster, cluster_namespace, tmp_path)
    found.load_images()
    found.provide_volumes()
    yield found
    found.kubectl("delete", "jobs", "--all", "--wait=false", check=False)
    found.release_resources()
    found.remove_cluster_objects()
    found.remove_volumes()
    cluster.kubectl("delete", "namespace", jobs_of(found), "--ignore-not-found", "--wait=false")


def jobs_of(release: Release) -> str:
    """The namespace that the chart makes for jobs."""
    return f"{release.namespace}-jobs"


def begun(job: JobHandle) -> bool:
    return "begun" in output(job)


def pods(release: Release, component: str, namespace: str = "") -> dict[str, tuple[str, int]]:
    """Of each pod: what it is and how often it was started again."""
    where = f"--namespace={namespace or release.namespace}"
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            sum(each["restartCount"] for each in pod["status"].get("containerStatuses", [])),
        )
        for pod in release.cluster.get("pods", where, f"--selector={component}")["items"]
    }


def apply(release: Release, name: str, code: str, **spec: object) -> None:
    """Somebody applies a job."""
    resource = small_job(code, name=name, **spec)
    resource["metadata"] = {"name": name, "namespace": release.namespace}
    release.cluster.apply(resource)


def await_running(release: Release, name: str) -> None:
    """Returns when a job runs that somebody applies."""
    apply(release, name, WAITING)
    release.kubectl("wait", "--for=condition=Running", f"trainingjob/{name}", f"--timeout={int(PATIENCE_S)}s")


def by_kubectl(release: Release, name: str) -> str:
    """How a job ends that somebody applies."""
    apply(release, name, "import os; print(os.environ['KEY'])", secrets=OF_A_SECRET)
    release.kubectl("wait", "--for=condition=Finished", f"trainingjob/{name}", f"--timeout={int(PATIENCE_S)}s")
    return str(release.objects("trainingjobs")[0]["status"]["phase"])


def shown_names(endpoint: str) -> list[str]:
    """The names in the certificate that the gateway shows."""
    host, _, port = endpoint.rpartition(":")
    found = x509.load_pem_x509_certificate(ssl.get_server_certificate((host, int(port))).encode())
    held = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return held.get_values_for_type(x509.DNSName)


def test_a_run_goes_on_through_an_upgrade_and_only_data_is_left_in_the_end(release: Release) -> None:
    release.install(**SMALL, storage={"className": release.namespace}, jobs={"namespace": ""})
    release.helm("test", release.name, f"--timeout={int(PATIENCE_S)}s")
    made = release.secrets()
    assert made.keys() == SECRETS

    with release.client() as client:
        job = client.submit(small_job(WAITING))
        wait_until(lambda: begun(job), "the job to begin")
        release.cluster.kubectl(
            *("create", "secret", "generic", "hub", "--from-literal=k=v", f"--namespace={jobs_of(release)}")
        )
        refused = client.submit(small_job("pass", secrets=OF_A_SECRET)).wait(PATIENCE_S, check=False)
        assert "without the label trainyard.dev/usable" in refused.message
    assert by_kubectl(release, "by-kubectl") == "Succeeded"
    release.cluster.kubectl("delete", "secret", "hub", f"--namespace={jobs_of(release)}")
    workers = pods(release, f"trainyard.dev/job-id={job.id}", jobs_of(release))
    services = pods(release, "app.kubernetes.io/component=scheduler")

    restarted = {"podAnnotations": {"test": "upgraded"}}
    release.install(
        **{name: SMALL.get(name, {}) | restarted for name in ("scheduler", "launcher", "metrics", "artifacts")},
        tls={"extraHosts": ["yard.example"]},
    )
    assert pods(release, "app.kubernetes.io/component=scheduler") != services
    assert pods(release, f"trainyard.dev/job-id={job.id}", jobs_of(release)) == workers
    kept = release.secrets()
    assert {name for name in made if kept[name] != made[name]} == {"yard-trainyard-tls"}
    with release.reached() as user:
        wait_until(lambda: "yard.example" in shown_names(user["TRAINYARD_ENDPOINT"]), "the certificate to be shown")

    (worker,) = workers
    release.cluster.kubectl(
        "exec",
        f"--namespace={jobs_of(release)}",
        worker,
        "--container=worker",
        "--",
        "python3",
        "-c",
        "open('/tmp/go', 'w')",
    )
    with release.client() as client:
        job = client.job(job.id)
        assert job.wait(PATIENCE_S, check=False).reason == "Completed"
        assert output(job) == ["begun", "done"]

    await_running(release, "abandoned")
    printed = release.uninstall()
    claims = {f"PersistentVolumeClaim/home-yard-trainyard-{name}-0" for name in ("scheduler", "metrics", "artifacts")}
    for claim in claims:
        assert claim.rpartition("/")[2] in printed
    wait_until(lambda: not release.objects("pods"), "the pods to be gone")
    left = release.named(KINDS)
    assert left == claims | {"ConfigMap/kube-root-ca.crt", "ServiceAccount/default", *RESOURCES}
    assert release.cluster_objects() == []
    assert f"kubectl delete namespace {jobs_of(release)}" in printed
    kept = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
    wait_until(lambda: left_beside(release) == kept, "the pods of jobs to end")
    phases = {each["metadata"]["name"]: each["status"]["phase"] for each in release.objects("trainingjobs")}
    assert phases == {"by-kubectl": "Succeeded", "abandoned": "Unmanaged"}
    release.kubectl("delete", "trainingjobs", *phases, f"--timeout={int(PATIENCE_S)}s")


def left_beside(release: Release) -> set[str]:
    """What is in the namespace of jobs."""
    return set(release.cluster.kubectl("get", KINDS, f"--namespace={jobs_of(release)}", "--output=name").split())


RESOURCES = {"TrainingJob/by-kubectl", "TrainingJob/abandoned"}


SMALL: dict[str, Any] = {"gateway": {"replicas": 1}}
