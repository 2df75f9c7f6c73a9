"""A volume of a service is enlarged as the guide says: the commands are the guide's own.

Hooks and images are left out, so nothing runs: what is tested is what the API server and helm accept, and that the pod
stays.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator

import pytest

from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S
from tests.cluster.release import CHART, HelmFailed, helm
from tests.cluster.resources import namespace
from tests.conftest import REPOSITORY, wait_until

SERVICE, CLAIM = "statefulset/yard-trainyard-metrics", "persistentvolumeclaim/home-yard-trainyard-metrics-0"
GUIDE = REPOSITORY / "docs" / "guides" / "upgrade.md"


@pytest.fixture
def place(cluster: Cluster) -> Iterator[str]:
    """A namespace, and a volume for the claim of metrics, of a class that allows expansion."""
    with namespace(cluster) as name:
        claim = {"name": CLAIM.partition("/")[2], "namespace": name}
        storage = {"provisioner": "kubernetes.io/no-provisioner", "allowVolumeExpansion": True}
        volume = {
            "capacity": {"storage": "200Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": name,
            "claimRef": claim,
            "hostPath": {"path": f"/tmp/{name}", "type": "DirectoryOrCreate"},
        }
        cluster.apply({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name}} | storage)
        cluster.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume})
        try:
            yield name
        finally:
            cluster.kubectl("delete", f"persistentvolume/{name}", f"storageclass/{name}", "--wait=false")


def commands(guide: str) -> list[list[str]]:
    """The commands of the section, without the namespace and the values of its reader."""
    block = re.search(r"## Enlarging a volume.*?```sh\n(.*?)```", guide, re.DOTALL)
    assert block is not None
    lines = block[1].replace("\\\n", " ").strip().splitlines()
    return [shlex.split(re.sub(r"--namespace trainyard|--wait|--values values.yaml", "", line)) for line in lines]


def test_a_volume_is_enlarged_by_the_guides_commands_while_its_pod_stays(cluster: Cluster, place: str) -> None:
    jobs = f"jobs.namespace={place},jobs.createNamespace=false,operator.enabled=false,networkPolicies.enabled=false"
    options = [
        *(f"--namespace={place}", "--no-hooks", "--skip-crds", f"--set={jobs},storage.className={place}"),
        f"--timeout={int(PATIENCE_S)}s",
    ]
    environ = {"KUBECONFIG": str(cluster.kubeconfig)}

    def get(what: str) -> dict:
        found: dict = json.loads(cluster.kubectl("get", what, f"--namespace={place}", "--output=json"))
        return found

    def pod() -> str:
        return str(get("pod/yard-trainyard-metrics-0")["metadata"]["uid"])

    helm("install", "yard", str(CHART), *options, environ=environ)
    for what, condition in (
        (CLAIM, "create"),
        (CLAIM, "jsonpath={.status.phase}=Bound"),
        ("pod/yard-trainyard-metrics-0", "create"),
    ):
        cluster.kubectl("wait", what, f"--for={condition}", f"--namespace={place}", f"--timeout={int(PATIENCE_S)}s")
    before = pod()
    patch, delete, upgrade = commands(GUIDE.read_text())
    assert upgrade[:4] == ["helm", "upgrade", "yard", "charts/trainyard"]
    with pytest.raises(HelmFailed, match="Forbidden: updates to statefulset spec for fields other than"):
        helm("upgrade", "yard", str(CHART), *upgrade[4:], *options, environ=environ)
    for command in (patch, delete):
        cluster.kubectl(f"--namespace={place}", *command[1:])
    helm("upgrade", "yard", str(CHART), *upgrade[4:], *options, environ=environ)

    [template] = get(SERVICE)["spec"]["volumeClaimTemplates"]
    assert template["spec"]["resources"]["requests"]["storage"] == "100Gi"
    assert get(CLAIM)["spec"]["resources"]["requests"]["storage"] == "100Gi"
    wait_until(lambda: get(SERVICE)["status"].get("replicas") == 1, "the pod to be adopted", PATIENCE_S)
    assert pod() == before
    helm("uninstall", "yard", f"--namespace={place}", "--no-hooks", environ=environ)
