"""The API server itself refuses a wrong TrainingJob with the name of its field, and fills in what is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.testbed.cluster import locks
from scripts.testbed.cluster.cluster import Cluster
from tests.cluster.resources import KIND, Resources, in_a_namespace
from tests.jobs import document

Spec = dict[str, Any]


@pytest.fixture(scope="module")
def resources(cluster: Cluster) -> Iterator[Resources]:
    """A namespace for all tests; their resources have names of their own."""
    with locks.lasting(cluster.layout, in_a_namespace(cluster)) as found:
        yield found


WRONG: dict[str, tuple[Spec, str, str]] = {
    "a misspelled key": ({"nodez": 2}, "spec.nodez", "unknown field"),
    "too many nodes": ({"nodes": 5000}, "spec.nodes", "less than or equal to 1024"),
    "a number for a text": ({"command": ["train", 3]}, "spec.command[1]", "must be of type string"),
    "no command": ({"command": []}, "spec.command", "at least 1 items"),
    "an empty program": ({"command": [""]}, "spec.command", "the program is empty"),
    "a shell line": ({"command": ["python train.py --x"]}, "spec.command", "a whole shell line"),
    "an unknown runtime": ({"runtime": "mpi"}, "spec.runtime", '"torchrun", "deepspeed", "process"'),
    "no unit of time": ({"deadline": "90"}, "spec.deadline", "should match"),
    "code of another machine": ({"code": {"path": "."}}, "spec.code.path", "apply what 'yard render FILE' prints"),
    "two sources of code": (
        {"code": {"artifact": "a", "git": {"url": "https://x/y", "ref": "main"}}},
        "spec.code",
        "exactly one of path, artifact, git",
    ),
    "a repository with a token": (
        {"code": {"git": {"url": "ftp://token@example.org/x.git", "ref": "main"}}},
        "spec.code.git.url",
        "has credentials",
    ),
    "a repository with a password": (
        {"code": {"git": {"url": "ssh://git:password@example.org/x.git", "ref": "main"}}},
        "spec.code.git.url",
        "has credentials",
    ),
    "no source of code": ({"code": {}}, "spec.code", "exactly one of path, artifact, git"),
    "no CPU": ({"resources": {"cpu": 0}}, "spec.resources.cpu", "1m to 4096 cores"),
    "two bytes of memory": ({"resources": {"memory": 2}}, "spec.resources.memory", '"1Mi" to "1Pi"'),
    "memory of an odd unit": ({"resources": {"memory": "2GiB"}}, "spec.resources.memory", "should match"),
    "a variable of the yard": ({"env": {"TRAINYARD_RANK": "0"}}, "spec.env", "are set by the yard"),
    "a variable of torchrun": ({"runtime": "torchrun", "env": {"RANK": "0"}}, "spec.env", "torchrun and deepspeed set"),
    "a variable that is a credential": ({"env": {"db_Password_1": "x"}}, "spec.env", "named like a credential"),
    "a secret from nowhere": (
        {"secrets": [{"name": "A", "from": {}}]},
        "spec.secrets[0].from",
        "exactly one of env, file, secret",
    ),
    "two secrets of one name": (
        {"secrets": [{"name": "A", "from": {"env": "B"}}, {"name": "A", "from": {"env": "C"}}]},
        "spec.secrets[1]",
        "Duplicate value",
    ),
    "a secret that is a variable": (
        {"env": {"A": "x"}, "secrets": [{"name": "A", "from": {"env": "B"}}]},
        "spec.secrets",
        "each variable once",
    ),
    "a path that leads out": ({"outputs": [{"path": "a/../..", "artifact": "m"}]}, "spec.outputs[0].path", "'..'"),
    "an absolute path": ({"inputs": [{"path": "/data", "artifact": "m"}]}, "spec.inputs[0].path", "should match"),
    "a pattern without a step": (
        {"checkpoints": {"path": "c", "pattern": "last.pt"}},
        "spec.checkpoints.pattern",
        "{step} exactly once",
    ),
    "a rule that matches nothing": (
        {"retries": {"rules": [{"action": "retry"}]}},
        "spec.retries.rules[0]",
        "at least one of exitCodes",
    ),
    "a volume of two things": (
        {"kubernetes": {"volumes": [{"name": "d", "mountPath": "/d", "secret": "a", "configMap": "b"}]}},
        "spec.kubernetes.volumes[0]",
        "exactly one of persistentVolumeClaim",
    ),
    "a volume over the agent": (
        {"kubernetes": {"volumes": [{"name": "d", "mountPath": "/opt/trainyard/x", "emptyDir": {}}]}},
        "spec.kubernetes.volumes[0].mountPath",
        "another path",
    ),
    "a toleration of nothing": (
        {"kubernetes": {"tolerations": [{"effect": "NoSchedule"}]}},
        "spec.kubernetes.tolerations[0]",
        "a key, or operator: Exists",
    ),
    "root as the user": ({"kubernetes": {"runAsUser": 0}}, "spec.kubernetes.runAsUser", "greater than or equal to 1"),
    "an image with a space": ({"image": "my image"}, "spec.image", "should match"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_dry_run_refuses_a_wrong_spec_with_its_field(resources: Resources, case: str) -> None:
    spec, field, words = WRONG[case]
    said = resources.dry_run(document(**({"command": ["true"]} | spec)))
    assert f"{field}:" in said or f'"{field}"' in said, said
    assert words in said


def test_every_mistake_is_told_at_once_and_nothing_is_made(resources: Resources) -> None:
    wrong = document(["true"], "wrong", resources={"cpu": 0, "memory": 2}, retries={"rules": [{"action": "fail"}]})
    said = resources.kubectl("create", "--dry-run=server", "--filename=-", input=json.dumps(wrong), check=False)
    for field in ("spec.resources.cpu", "spec.resources.memory", "spec.retries.rules[0]"):
        assert f"{field}:" in said
    assert "wrong" not in resources.names()


def test_a_name_that_no_job_can_have_is_refused(resources: Resources) -> None:
    assert "metadata.name has to be" in resources.dry_run(document(["true"], "a.b"))


def test_what_is_left_out_gets_its_default(resources: Resources) -> None:
    resources.apply(document(["true"], "short", resources={"cpu": "250m"}))
    spec = resources.get("short")["spec"]
    assert (spec["queue"], spec["nodes"], spec["gracePeriod"], spec["runtime"]) == ("default", 1, "30s", "process")
    assert spec["resources"] == {"cpu": "250m", "memory": "1Gi", "gpu": 0}
    assert spec["retries"] == {"limit": 0, "backoff": "5s", "rules": []}


def test_a_full_spec_is_taken(resources: Resources) -> None:
    full = document(
        ["python", "train.py"],
        "full",
        image="registry.example.com:5000/team/train:v1",
        code={"artifact": "digits-code@3"},
        secrets=[{"name": "KEY", "from": {"secret": {"name": "hub", "key": "token"}}}],
        checkpoints={"path": "c", "pattern": "s-{step}.pt", "keep": {"best": {"metric": "acc", "mode": "max"}}},
        kubernetes={
            "nodeSelector": {"example.com/gpu": "a100"},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "volumes": [
                {"name": "data", "mountPath": "/data", "readOnly": True, "persistentVolumeClaim": "datasets"},
                {"name": "scratch", "mountPath": "/scratch", "emptyDir": {"sizeLimit": "1Gi"}},
            ],
            "sharedMemory": "1Gi",
            "topology": "spread",
            "runAsUser": 1000,
        },
    )
    resources.apply(full)
    kubernetes = resources.get("full")["spec"]["kubernetes"]
    assert kubernetes["volumes"][1] == {
        "name": "scratch", "mountPath": "/scratch", "readOnly": False, "emptyDir": {"sizeLimit": "1Gi"},
    }  # fmt: skip


def _submitted(resources: Resources, name: str) -> None:
    resources.apply(document(["true"], name))
    said = json.dumps({"status": {"jobId": "j-1", "phase": "Running", "progress": "3/9 (33%)", "best": "acc=0.9"}})
    resources.kubectl("patch", KIND, name, "--subresource=status", "--type=merge", f"--patch={said}")


def test_the_spec_of_a_submitted_job_does_not_change(resources: Resources) -> None:
    _submitted(resources, "taken")
    resources.kubectl("label", KIND, "taken", "team=vision")
    patch = '--patch={"spec":{"priority":7}}'
    said = resources.kubectl("patch", KIND, "taken", "--type=merge", patch, check=False)
    assert "delete the resource and apply it anew" in said


def test_a_spec_that_was_not_submitted_yet_may_change(resources: Resources) -> None:
    resources.apply(document(["true"], "open"))
    resources.apply(document(["true"], "open", priority=7))
    assert resources.get("open")["spec"]["priority"] == 7


def test_a_list_shows_what_a_job_does(resources: Resources) -> None:
    _submitted(resources, "shown")
    head, row = resources.kubectl("get", "tj", "shown").splitlines()
    assert head.split() == ["NAME", "PHASE", "REASON", "PROGRESS", "LEFT", "BEST", "AGE"]
    assert row.split()[1:5] == ["Running", "3/9", "(33%)", "acc=0.9"]


def test_a_phase_that_does_not_exist_is_refused(resources: Resources) -> None:
    resources.apply(document(["true"], "dreamer"))
    patch = '--patch={"status":{"phase":"Dreaming"}}'
    said = resources.kubectl("patch", KIND, "dreamer", "--subresource=status", "--type=merge", patch, check=False)
    assert "status.phase" in said


def test_the_resource_has_short_names_and_a_category(resources: Resources) -> None:
    resources.apply(document(["true"], "named"))
    for name in ("trainingjob", "tj", "tjob", "trainyard"):
        assert "named" in resources.kubectl("get", name)


def test_every_field_is_explained(resources: Resources) -> None:
    assert "Size of `/dev/shm`" in resources.kubectl("explain", "tj.spec.kubernetes.sharedMemory")
    assert "-required-" in resources.kubectl("explain", "tj.spec.checkpoints")
