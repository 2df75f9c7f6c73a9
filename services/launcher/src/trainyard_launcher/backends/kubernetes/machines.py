"""The cluster's nodes as machines: what they offer, and whether they are well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard_protos.v1 import common_pb2, scheduler_pb2

from trainyard_launcher.backends.kubernetes import taints
from trainyard_launcher.settings import Settings

_UNITS: dict[str, float] = {f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("KMGTPE", 1)}
_UNITS |= {prefix: 10 ** (3 * power) for power, prefix in enumerate("kMGTPE", 1)}
_UNITS |= {"m": 1e-3, "u": 1e-6, "n": 1e-9}

Taken = Mapping[str, Mapping[str, float]]  # by machine, amounts by the names of the resources


@dataclass(frozen=True, slots=True)
class Machine:
    """What is kept of a node of the cluster."""

    name: str
    ready: bool
    cordoned: bool
    taints: tuple[taints.Taint, ...]
    cpu: float
    memory_bytes: int
    resources: Mapping[str, int]
    kubelet: str  # its version, "v1.36.3"
    runtime: str  # of containers, "containerd://2.4.2"


def read(node: Mapping[str, Any]) -> Machine:
    """A node's readiness and what pods can have of it."""
    status, spec = node.get("status", {}), node.get("spec", {})
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", ()))
    amounts, versions = status.get("allocatable", {}), status.get("nodeInfo", {})
    return Machine(
        name=str(node["metadata"]["name"]),
        ready=ready,
        cordoned=bool(spec.get("unschedulable", False)),
        taints=taints.read(spec),
        cpu=amount(str(amounts.get("cpu", "0"))),
        memory_bytes=int(amount(str(amounts.get("memory", "0")))),
        resources={name: int(value) for name, value in amounts.items() if "/" in name and str(value).isdigit()},
        kubelet=str(versions.get("kubeletVersion", "")),
        runtime=str(versions.get("containerRuntimeVersion", "")),
    )


def offered(
    machines: Iterable[Machine],
    settings: Settings,
    residents: Taken | None = None,
    guests: Taken | None = None,
    tolerations: Sequence[taints.Toleration] = (),
) -> list[scheduler_pb2.Machine]:
    """What the scheduler may count on: the machines that take pods, less what others have of each and the agent's own
    share; and what guests have, which they may leave.

    Args:
        residents: what pods ask for that are there for as long as the machine is.
        guests: what other pods of others ask for.
        tolerations: of every pod. That of machines for GPUs is had by those that ask for some.
    """
    tolerations = [*tolerations, taints.of_gpus(settings.kubernetes_gpu_resource)]
    return [
        _offer(each, settings, (residents or {}).get(each.name, {}), (guests or {}).get(each.name, {}))
        for each in sorted(machines, key=lambda each: each.name)
        if each.ready and not each.cordoned and taints.tolerated(each.taints, tolerations)
    ]


def _offer(
    machine: Machine, settings: Settings, residents: Mapping[str, float], guests: Mapping[str, float]
) -> scheduler_pb2.Machine:
    gpu = settings.kubernetes_gpu_resource
    whole = {
        "cpu": machine.cpu - settings.agent_cpu,
        "memory": machine.memory_bytes - settings.agent_memory,
        gpu: machine.resources.get(gpu, 0),
    }
    room = {name: max(size - residents.get(name, 0), 0) for name, size in whole.items()}
    held = {name: min(guests.get(name, 0), size) for name, size in room.items()}

    def resources(amounts: Mapping[str, float]) -> common_pb2.Resources:
        return common_pb2.Resources(cpu=amounts["cpu"], memory_bytes=int(amounts["memory"]), gpu=int(amounts[gpu]))

    return scheduler_pb2.Machine(
        name=machine.name,
        total=resources({name: size - held[name] for name, size in room.items()}),
        others=resources(held) if any(held.values()) else None,
    )


def avoid(pod_spec: dict[str, Any], names: Iterable[str]) -> None:
    """Keeps a pod away from machines, by their names."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in sorted(names)]
    if fields:
        affinity = pod_spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
        required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": [{}]})
        required["nodeSelectorTerms"] = [  # one of them has to hold; they may be the template's, which stays as it is
            term | {"matchFields": [*term.get("matchFields", ()), *fields]} for term in required["nodeSelectorTerms"]
        ]


def amount(text: str) -> float:
    """A quantity of Kubernetes as a number: "500m" is 0.5, "1Ki" is 1024."""
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text)
