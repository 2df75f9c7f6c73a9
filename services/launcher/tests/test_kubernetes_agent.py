"""How the agent gets into pods: which machines mount its image, and what is said where it cannot be mounted."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from trainyard.spec import Spec
from trainyard_launcher.backend import Facts, Launch
from trainyard_launcher.backends.kubernetes import machines, manifests, names, pods
from trainyard_launcher.backends.kubernetes.agent_volume import AgentVolume
from trainyard_launcher.settings import Settings
from trainyard_protos.v1 import common_pb2

SETTINGS = Settings(backend="kubernetes", identity="platform-yard", kubernetes_agent_image="registry/agent:1")
COPY = SETTINGS.model_copy(update={"kubernetes_agent_volume": "copy"})
IMAGE = SETTINGS.model_copy(update={"kubernetes_agent_volume": "image"})


def machine(kubelet: str = "v1.36.3", runtime: str = "containerd://2.4.2") -> machines.Machine:
    versions = {"kubeletVersion": kubelet, "containerRuntimeVersion": runtime}
    return machines.read({"metadata": {"name": "node-1"}, "status": {"nodeInfo": versions}})


def pod_spec(*, mounted: bool) -> dict[str, Any]:
    facts = Facts("default", "job-1", "digits", "0198c0de-0000-7000-8000-00123456789a", 1, 1, 1, 30)
    launch = Launch(facts, [], common_pb2.Resources(), spec=Spec(command=("true",)))
    job = manifests.job(launch, "yard:1", SETTINGS, agent_mounted=mounted)
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


def agents(pod: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its volume, and where the worker sees it."""
    [volume] = [each for each in pod["volumes"] if each["name"] == manifests.AGENT_VOLUME]
    [mount] = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == manifests.AGENT_VOLUME]
    return volume, mount


def test_a_mounted_agent_is_a_folder_of_its_image_and_nothing_is_copied() -> None:
    pod = pod_spec(mounted=True)
    volume, mount = agents(pod)
    assert pod["initContainers"] == []
    assert volume["image"] == {"reference": "registry/agent:1", "pullPolicy": "IfNotPresent"}
    assert mount == {
        "name": manifests.AGENT_VOLUME,
        "mountPath": "/opt/trainyard",
        "subPath": "opt/trainyard",
        "readOnly": True,
    }


def test_a_copied_agent_comes_by_an_init_container() -> None:
    pod = pod_spec(mounted=False)
    volume, mount = agents(pod)
    [copies] = pod["initContainers"]
    assert (copies["name"], copies["image"]) == ("agent", "registry/agent:1")
    assert "emptyDir" in volume
    assert "subPath" not in mount


@pytest.mark.parametrize(
    ("kubelet", "runtime"),
    [
        ("v1.35.0", "containerd://2.2.0"),
        ("v1.36.3", "containerd://2.4.2"),
        ("v1.35.2-gke.1001", "containerd://2.2.1-k3s1"),
        ("v2.0.0", "containerd://3.0.0-rc.1"),
    ],
)
def test_it_is_mounted_where_every_machine_can(kubelet: str, runtime: str) -> None:
    volume = AgentVolume(SETTINGS, {})
    assert volume.is_mounted([machine(), machine(kubelet, runtime)])


@pytest.mark.parametrize(
    ("kubelet", "runtime"),
    [
        ("v1.34.9", "containerd://2.4.2"),
        ("v1.35.1", "containerd://2.1.6+bottlerocket"),
        ("v1.36.3", "containerd://1.7.27"),
        ("v1.36.3", "cri-o://1.36.0"),
        ("v1.36.3", "docker://29.0.0"),
        ("kwok-v0.8.0", "containerd://2.4.2"),
        ("", ""),
    ],
)
def test_it_is_copied_where_one_machine_cannot_and_the_log_says_which(
    kubelet: str, runtime: str, caplog: pytest.LogCaptureFixture
) -> None:
    volume = AgentVolume(SETTINGS, {})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not volume.is_mounted([machine(), machine(kubelet, runtime)])
    [said] = caplog.records
    assert "machine node-1 has kubelet" in said.why  # type: ignore[attr-defined]
    assert kubelet in said.why  # type: ignore[attr-defined]
    assert runtime in said.why  # type: ignore[attr-defined]


def test_it_is_copied_while_no_machine_is_known() -> None:
    assert not AgentVolume(SETTINGS, {}).is_mounted([])


def test_a_template_that_changes_the_init_container_has_it_copied() -> None:
    template = {"spec": {"initContainers": [{"name": "agent", "env": [{"name": "A", "value": "1"}]}]}}
    assert not AgentVolume(SETTINGS, template).is_mounted([machine()])
    other = {"spec": {"initContainers": [{"name": "own", "image": "team/own"}]}}
    assert AgentVolume(SETTINGS, other).is_mounted([machine()])


def test_who_runs_the_yard_may_decide() -> None:
    assert AgentVolume(IMAGE, {}).is_mounted([machine("v1.33.0")])
    assert not AgentVolume(COPY, {}).is_mounted([machine()])


# What is said where it does not work


def pod(status: dict[str, Any], *, mounted: bool) -> pods.Pod:
    labels = {names.ATTEMPT_ID: "a1", names.INDEX: "0"}
    metadata = {"name": "p", "uid": "u", "labels": labels}
    found = pods.read({"metadata": metadata, "spec": pod_spec(mounted=mounted), "status": status})
    assert found is not None
    return found


def waiting(reason: str, message: str, container: str = "worker") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    status = {"name": container, "image": "team/train:1", "state": state}
    return {"phase": "Pending", "containerStatuses": [status]}


def test_an_agents_image_that_cannot_be_pulled_is_not_taken_for_the_jobs() -> None:
    message = 'Back-off pulling image "registry/agent:1"'
    trouble = pod(waiting("ImagePullBackOff", message), mounted=True).trouble
    assert trouble is not None
    assert trouble.reason == "ImageUnavailable"
    assert "image registry/agent:1 cannot be had" in trouble.message
    assert "TRAINYARD_LAUNCHER_KUBERNETES_AGENT_IMAGE" in trouble.message
    theirs = pod(waiting("ImagePullBackOff", 'Back-off pulling image "team/train:1"'), mounted=True).trouble
    assert theirs is not None
    assert "image team/train:1 cannot be had" in theirs.message
    assert "check spec.image" in theirs.message


MOUNT_FAILED = "ImageVolumeMountFailed: failed to mount image volume component"
WRONG_FOLDER = 'exec: "/opt/trainyard/bin/python": stat /opt/trainyard/bin/python: no such file or directory'


@pytest.mark.parametrize("message", [MOUNT_FAILED, WRONG_FOLDER])
def test_a_machine_that_cannot_mount_images_is_told_with_what_to_do(message: str) -> None:
    trouble = pod(waiting("CreateContainerError", message), mounted=True).trouble
    assert trouble is not None
    assert trouble.reason == "StartFailed"
    assert "TRAINYARD_LAUNCHER_KUBERNETES_AGENT_VOLUME=copy" in trouble.message
    terminated = {"name": "worker", "state": {"terminated": {"reason": "StartError", "message": message}}}
    ended = pod({"phase": "Failed", "containerStatuses": [terminated]}, mounted=True).cause
    assert ended is not None
    assert ended.reason == "StartFailed"
    assert "TRAINYARD_LAUNCHER_KUBERNETES_AGENT_VOLUME=copy" in ended.message


def test_where_nothing_is_mounted_nobody_is_told_to_copy() -> None:
    trouble = pod(waiting("CreateContainerError", WRONG_FOLDER), mounted=False).trouble
    assert trouble is not None
    assert "AGENT_VOLUME" not in trouble.message
