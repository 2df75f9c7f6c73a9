"""What a pod's status means: whether it is over and why, or what keeps it from running, each with what to do next.

Pure: from the JSON of a pod to a few words. The words are those of `Exit.reason`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from trainyard_protos.v1 import common_pb2

from trainyard_launcher.backends.kubernetes import names
from trainyard_launcher.backends.kubernetes.machines import amount
from trainyard_launcher.backends.kubernetes.manifests import AGENT, AGENT_FOLDER, AGENT_VOLUME, WORKER

Object = Mapping[str, Any]

_IMAGE_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "RegistryUnavailable",
        "SignatureValidationFailed",
        "ImageInspectError",
    }
)
_HOPELESS_IMAGES = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_EVICTIONS = {
    "PreemptionByScheduler": "more important pods needed its place",
    "DeletionByTaintManager": "its node was tainted, for instance because it is not ready",
    "EvictionByEvictionAPI": "its node is drained, or somebody evicted it",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "its node ran out of memory or disk, or is shut down",
}
# The kubelet's words when a pod is over a limit of its own: nobody else needed the room.
_OWN_LIMIT = re.compile(r"exceeds the (total )?limit|exceeded its local ephemeral storage limit")
_MESSAGE_MOST = 1000


@dataclass(frozen=True, slots=True)
class Trouble:
    """What keeps a pod from running. A hopeless one does not get better by itself."""

    reason: str
    message: str
    hopeless: bool = False
    detail: str = ""  # the cluster's own words


@dataclass(frozen=True, slots=True)
class Pod:
    """What is kept of a pod."""

    name: str
    uid: str
    attempt_id: str
    node: int
    owner: str  # uid of its Job
    machine: str
    over: bool  # nothing of it runs, and nothing will
    failed: bool  # it is over, and was not told to end before it failed
    deleting: bool
    trouble: Trouble | None
    record: common_pb2.Exit | None
    cause: common_pb2.Exit | None
    out_of_memory: bool
    memory_limit: int  # of the workers' container, in bytes; 0: none
    gates: tuple[str, ...] = ()  # that keep the cluster's scheduler from it
    affinity: Object | None = None  # while there are any
    claims: tuple[str, ...] = ()  # volume claims that it mounts


def read(pod: Object) -> Pod | None:
    """What is kept of a pod; None when it is no node of an attempt."""
    metadata, status, spec = pod["metadata"], pod.get("status", {}), pod.get("spec", {})
    gates = [str(each["name"]) for each in spec.get("schedulingGates", ())]
    labels = metadata.get("labels", {})
    try:
        attempt_id, node = str(labels[names.ATTEMPT_ID]), int(labels[names.INDEX])
    except (KeyError, ValueError):
        return None
    owners = [str(each["uid"]) for each in metadata.get("ownerReferences", ()) if each.get("controller")]
    end, agent_image = _terminated(status, WORKER), _mounted_agent(pod)
    record = exit_record(str(end.get("message", "")))
    return Pod(
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        attempt_id=attempt_id,
        node=node,
        owner=owners[0] if owners else "",
        machine=str(spec.get("nodeName", "")),
        over=status.get("phase") in ("Succeeded", "Failed"),
        failed=status.get("phase") == "Failed" and (record is None or record.reason != "Stopped"),
        deleting="deletionTimestamp" in metadata,
        trouble=_trouble(status, agent_image) if status.get("phase") == "Pending" else None,
        record=record,
        cause=_cause(metadata, status, end, agent_image),
        out_of_memory=end.get("reason") == "OOMKilled",
        memory_limit=_memory_limit(spec),
        gates=tuple(gates),
        affinity=spec.get("affinity", {}) if gates else None,
        claims=tuple(
            str(volume["persistentVolumeClaim"]["claimName"])
            for volume in spec.get("volumes", ())
            if "persistentVolumeClaim" in volume
        ),
    )


def _memory_limit(spec: Object) -> int:
    worker: Object = next((each for each in spec.get("containers", ()) if each["name"] == WORKER), {})
    return int(amount(str(worker.get("resources", {}).get("limits", {}).get("memory", "0"))))


def exit_record(text: str) -> common_pb2.Exit | None:
    """The record an agent left as its termination message; None when it left none.

    Without a message, Kubernetes shows the end of the log there: a worker's line of JSON is no record.
    """
    try:
        record = json_format.ParseDict(json.loads(text), common_pb2.Exit(), ignore_unknown_fields=True)
        return record if record.reason else None
    except (ValueError, TypeError, AttributeError, json_format.ParseError):
        return None


def deleted() -> common_pb2.Exit:
    """Why a node ended whose pod somebody took away."""
    return common_pb2.Exit(
        reason="PodDeleted",
        message="somebody deleted its pod or its Job; to end a job for good use: yard cancel, or kubectl delete "
        "trainingjob",
    )


def told_to_end(pod: Pod) -> common_pb2.Exit | None:
    """Why a node ended whose agent was told to by nobody that the cluster knows of; None when it was not told to."""
    if pod.record is None or pod.record.reason != "Stopped":
        return None
    return common_pb2.Exit(
        reason="Evicted",
        message=f"something on machine {pod.machine} told its container to end (SIGTERM), and the cluster does not say "
        f"why: the machine may be going down; see: kubectl describe node {pod.machine}",
    )


def lost(machine: str) -> common_pb2.Exit:
    """Why a node ended whose machine is gone."""
    return common_pb2.Exit(
        reason="NodeLost",
        message=f"machine {machine} is gone: its agents are silent, and it is not ready or renews no lease; see: "
        f"kubectl describe node {machine}",
    )


def create_trouble(message: str) -> Trouble:
    """The Job controller may not make pods."""
    return Trouble(
        "PodsRefused",
        f"the cluster refuses its pods: {_short(message)}; change what the job asks for, or let who runs the cluster "
        "allow it",
    )


def mount_trouble(message: str) -> Trouble:
    """A volume cannot be mounted."""
    return Trouble("VolumeUnavailable", f"{_short(message)}; check spec.kubernetes.volumes and what it names")


def _mounted_agent(pod: Object) -> str:
    """The image of the agent, when it is mounted; "" when it is copied."""
    volumes = pod.get("spec", {}).get("volumes", ())
    return next((str(each["image"]["reference"]) for each in volumes if _is_mounted_agent(each)), "")


def _is_mounted_agent(volume: Object) -> bool:
    return volume["name"] == AGENT_VOLUME and "image" in volume


def _trouble(status: Object, agent_image: str) -> Trouble | None:
    for condition in status.get("conditions", ()):
        if condition.get("reason") == "SchedulingGated":
            return None  # its machine is being told to it
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _unscheduled(str(condition.get("message", "")))
    for container in _containers(status):
        waiting = container.get("state", {}).get("waiting", {})
        reason, message = str(waiting.get("reason", "")), str(waiting.get("message", ""))
        found = _waiting_trouble(container, reason, message, agent_image)
        if found is not None:
            return found
    return None


def awaiting(kind: str, trouble: Trouble) -> Trouble:
    """A pod that finds no room waits for a machine of a kind to be made."""
    return Trouble(
        "WaitingForMachines", f"it waits for a machine of kind '{kind}' to be made; the cluster says: {trouble.detail}"
    )


def _unscheduled(message: str) -> Trouble:
    if "persistentvolumeclaim" in message.lower():  # is not there, or no volume is bound to it
        return mount_trouble(message)
    return Trouble(
        "Unschedulable",
        f"no node takes its pod: {_short(message)}; when that lasts, the job returns to its place in the queue and is "
        "tried elsewhere",
        detail=_short(message),
    )


def _waiting_trouble(container: Object, reason: str, message: str, agent_image: str) -> Trouble | None:
    if reason in _IMAGE_REASONS:
        return _image_trouble(container, reason, message, agent_image)
    if reason == "CreateContainerConfigError":
        return Trouble(
            "VolumeUnavailable",
            f"{_short(message)}; check the Secrets and ConfigMaps that spec.secrets and spec.kubernetes.volumes name",
        )
    if reason in ("CreateContainerError", "RunContainerError"):
        hint = _mount_hint(message, agent_image)
        return Trouble("StartFailed", f"the container cannot be made: {_short(message)}{hint}")
    return None


def _image_trouble(container: Object, reason: str, message: str, agent_image: str) -> Trouble:
    """A container waits for its own image, or for the agent's, which it mounts."""
    image, check = str(container.get("image", "")), "check spec.image, spec.kubernetes.pullPolicy and pullSecrets"
    if container["name"] == AGENT or (agent_image and agent_image in message):
        image = agent_image or image
        check = "it brings the agent: who runs the yard checks TRAINYARD_LAUNCHER_KUBERNETES_AGENT_IMAGE"
    return Trouble(
        "ImageUnavailable",
        f"image {image} cannot be had: {reason}: {_short(message)}; {check}",
        hopeless=reason in _HOPELESS_IMAGES,
    )


def _mount_hint(message: str, agent_image: str) -> str:
    """What to do when the agent's image was not mounted, or not the right folder of it."""
    if agent_image and ("ImageVolumeMountFailed" in message or f"{AGENT_FOLDER}/bin/" in message):
        return "; can its machine mount images? TRAINYARD_LAUNCHER_KUBERNETES_AGENT_VOLUME=copy does without"
    return ""


def _cause(metadata: Object, status: Object, end: Object, agent_image: str) -> common_pb2.Exit | None:
    """Why it ended or is about to, as far as the cluster says."""
    eviction = next((each for each in status.get("conditions", ()) if _is_disruption(each)), None)
    if status.get("reason") == "Evicted" or eviction is not None:
        return _evicted(status, eviction)
    if end.get("reason") == "OOMKilled":
        return common_pb2.Exit(
            reason="OutOfMemory", message="the node used more memory than its limit: raise spec.resources.memory"
        )
    if status.get("phase") == "Failed" and status.get("reason"):
        # The node's kubelet did not admit it, or no more after a restart: OutOfcpu, NodeAffinity, Terminated, ...
        did = "ended" if end else "refused"
        return common_pb2.Exit(
            reason="Evicted", message=f"its node {did} it: {status['reason']}: {_short(status.get('message', ''))}"
        )
    if "deletionTimestamp" in metadata:
        return deleted()
    return _failed_start(status, end, agent_image)


def _is_disruption(condition: Object) -> bool:
    return bool(condition["type"] == "DisruptionTarget" and condition["status"] == "True")


def _evicted(status: Object, condition: Object | None) -> common_pb2.Exit:
    message = _short(status.get("message", "") or (condition or {}).get("message", ""))
    because = f": {message}" if message else ""
    if _OWN_LIMIT.search(message):
        return common_pb2.Exit(
            reason="Evicted",
            message=f"its pod was evicted because it stored more than it may{because}; raise the sizeLimit in "
            "spec.kubernetes.volumes or sharedMemory, or store less",
        )
    why = _EVICTIONS.get(str((condition or {}).get("reason", "")), "the cluster needed its place")
    return common_pb2.Exit(reason="Evicted", message=f"its pod was evicted: {why}{because}")


def _failed_start(status: Object, end: Object, agent_image: str) -> common_pb2.Exit | None:
    """A container that could not run at all, or the one that brings the agent."""
    agent = _terminated(status, AGENT)
    if agent.get("exitCode", 0):
        message = _short(agent.get("message", "") or agent.get("reason", ""))
        return common_pb2.Exit(
            reason="StartFailed",
            message=f"the agent was not copied into the pod (exit code {agent['exitCode']}): {message}",
        )
    if end.get("reason") in ("StartError", "ContainerCannotRun", "ContainerStatusUnknown"):
        message = _short(end.get("message", ""))
        hint = _mount_hint(message, agent_image)
        return common_pb2.Exit(reason="StartFailed", message=f"the container did not start: {message}{hint}")
    return None


def _containers(status: Object) -> Iterator[Object]:
    yield from status.get("initContainerStatuses", ())
    yield from status.get("containerStatuses", ())


def _terminated(status: Object, container: str) -> Object:
    for each in _containers(status):
        if each["name"] == container:
            found: Object = each.get("state", {}).get("terminated", {})
            return found
    return {}


def _short(text: object) -> str:
    return " ".join(str(text).split())[:_MESSAGE_MOST].rstrip(".")
