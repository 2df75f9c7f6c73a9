"""The same file by `yard submit`, by the SDK and by `kubectl apply` becomes the same Job with the same pods.

The yard, the operator and the API server, which fills in the resource's defaults, are real. What the launcher of a
cluster makes of the three jobs is compared; `test_end_to_end_installed.py` compares the pods themselves.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from servicekit.auth import AttemptTokens
from trainyard.client import JobHandle
from trainyard_launcher.backends.kubernetes import manifests
from trainyard_launcher.plan import Planner
from trainyard_launcher.settings import Settings
from trainyard_protos.v1 import scheduler_pb2

from scripts.testbed.cluster.cluster import Cluster
from tests.cluster.resources import OperatorProcess, Resources, install, namespace
from tests.conftest import YardHome

SETTINGS = Settings(backend="kubernetes", identity="platform-yard", kubernetes_allowed_tolerations="gpu,team")
SPEC = {
    "priority": 70,
    "runtime": "torchrun",
    "command": ["python", "train.py", "--rate", "1e-3"],
    "code": {"path": "."},
    "nodes": 2,
    "workersPerNode": 2,
    "resources": {"cpu": "50m", "memory": "48Mi"},
    "env": {"COLOUR": "green", "NUMBER": "010"},
    "checkpoints": {"path": "saved", "pattern": "s-{step}.pt", "keep": {"best": {"metric": "loss", "mode": "min"}}},
    "outputs": [{"path": "made", "artifact": "model"}],
    "retries": {"limit": 1, "rules": [{"exitCodes": [3], "action": "fail"}]},
    "gracePeriod": "2s",
    "deadline": "1h",
    "kubernetes": {
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}, {"key": "team", "value": "vision"}],
        "volumes": [
            {"name": "data", "mountPath": "/data", "persistentVolumeClaim": "datasets", "readOnly": True},
            {"name": "scratch", "mountPath": "/scratch", "emptyDir": {"sizeLimit": "1Gi"}},
        ],
        "sharedMemory": "8Mi",
        "topology": "spread",
        "runAsUser": 1234,
    },
}


def test_the_same_file_by_command_line_sdk_and_kubectl_becomes_the_same_pods(
    cluster: Cluster, yard: YardHome, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    file = tmp_path / "job.json"
    metadata = {"name": "same", "labels": {"team": "vision"}}
    file.write_text(
        json.dumps({"apiVersion": "trainyard.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": SPEC})
    )
    with yard.client() as client:
        by_command_line = client.job(json.loads(printed(yard, "submit", file, "--output=json"))["job"]["id"])
        by_sdk = client.submit(file)
        by_kubectl = client.job(applied(cluster, yard, tmp_path, printed(yard, "render", file)))
        made = [launched(job, tmp_path) for job in (by_command_line, by_sdk, by_kubectl)]
    assert len({by_command_line.id, by_sdk.id, by_kubectl.id}) == 3
    pod = made[0]["job"]["spec"]["template"]["spec"]
    assert (pod["nodeSelector"], pod["securityContext"]["runAsUser"]) == ({"disk": "fast"}, 1234)
    assert made[0]["job"]["spec"]["template"]["metadata"]["labels"]["team"] == "vision"
    assert made[0]["plans"][1]["env"] == SPEC["env"]
    assert made[1] == made[0]
    assert made[2] == made[0]


def printed(yard: YardHome, *arguments: str | Path) -> str:
    """What a command prints that does what it is asked."""
    done = yard.run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def applied(cluster: Cluster, yard: YardHome, folder: Path, rendered: str) -> str:
    """The id of the job that an operator makes of a resource."""
    install(cluster)
    with namespace(cluster) as name:
        resources = Resources(cluster, name)
        operator = OperatorProcess(cluster, name, yard.folder, folder / "operator", {"RETRY_S": "0.1"})
        operator.start()
        try:
            resources.kubectl("apply", "--filename=-", input=rendered)
            job_id = str(resources.until("same", lambda said: said.get("jobId"), "to have a job")["jobId"])
            resources.delete("same")  # nobody lets go of it afterwards
        finally:
            operator.stop()
    return job_id


def launched(job: JobHandle, home: Path) -> dict[str, Any]:
    """What the launcher of a cluster makes of a job: its Job, and the plans of its agents without their tokens.

    The ids are the same for all jobs, so that only what was asked for can differ; the code is a new version each time.
    """
    known = job.status()
    spec, codes = re.subn(r'"same-code@\d+"', '"same-code"', known.resolved)
    assert codes == 1
    planner = Planner(AttemptTokens.load_or_create(home), "yard:443", home, SETTINGS)
    launch = planner.launch(
        scheduler_pb2.Assignment(
            workspace=known.workspace,
            job_id="job",
            job_name=known.name,
            attempt_id="0198c0de-0000-7000-8000-00123456789a",
            fence=1,
            spec=spec,
        )
    )
    for plan in launch.plans:
        plan.ClearField("token")
    return {
        "job": manifests.job(launch, "yard:443", SETTINGS),
        "plans": [json_format.MessageToDict(plan) for plan in launch.plans],
    }
