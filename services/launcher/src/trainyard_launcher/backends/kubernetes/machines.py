"""The cluster's nodes as machines: what they offer, and whether they are well."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard_protos.v1 import common_pb2, scheduler_pb2

from trainyard_launcher.backends.kubernetes import placement, taints
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
    labels: Mapping[str, str]
    taints: tuple[taints.Taint, ...]
    cpu: float
    pods: int
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
        labels=node["metadata"].get("labels", {}),
        taints=taints.read(spec),
        cpu=amount(str(amounts.get("cpu", "0"))),
        pods=int(amounts.get("pods", 0)),
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
    template: Mapping[str, Any] | None = None,
    lost: Container[str] = (),
) -> tuple[list[scheduler_pb2.Machine], list[scheduler_pb2.Machine]]:
    """What the scheduler may count on, and the machines that cannot be used now: each less what residents have of it,
    with what guests have, which they may leave.

    Args:
        residents: what pods ask for that are there for as long as the machine is.
        guests: what other pods of others ask for.
        template: spec of what is merged into every pod: machines to which it lets no pod go are none of the pool.
        lost: names of machines that are lost, although Kubernetes may still call them ready.
    """
    template, residents, guests = template or {}, residents or {}, guests or {}
    usable: list[scheduler_pb2.Machine] = []
    unusable: list[scheduler_pb2.Machine] = []
    for each in sorted(machines, key=lambda each: each.name):
        if placement.accepts(template, each.name, each.labels):
            keep_away = taints.untolerated(each.taints, template.get("tolerations") or ())
            # Temporary taints make a machine unusable for now. They are not announced, because no job has to tolerate
            # them: it waits until the machine can be used again.
            lasting = [taint for taint in keep_away if not taints.passing(taint)]
            well = each.ready and each.name not in lost
            used = well and not each.cordoned and len(lasting) == len(keep_away)
            offer = _offer(each, settings, residents.get(each.name, {}), guests.get(each.name, {}), lasting)
            (usable if used else unusable).append(offer)
    return usable, unusable


def _offer(
    machine: Machine,
    settings: Settings,
    residents: Mapping[str, float],
    guests: Mapping[str, float],
    keep_away: Iterable[taints.Taint],
) -> scheduler_pb2.Machine:
    gpu = settings.kubernetes_gpu_resource
    whole = {
        "cpu": machine.cpu,
        "memory": machine.memory_bytes,
        "pods": machine.pods,
        gpu: machine.resources.get(gpu, 0),
    }
    room = {name: max(size - residents.get(name, 0), 0) for name, size in whole.items()}
    held = {name: min(guests.get(name, 0), size) for name, size in room.items()}
    return scheduler_pb2.Machine(
        name=machine.name,
        total=resources({name: size - held[name] for name, size in room.items()}, gpu),
        others=resources(held, gpu) if any(held.values()) else None,
        labels=machine.labels,
        taints=taints.messages(keep_away),
    )


def resources(amounts: Mapping[str, float], gpu: str) -> common_pb2.Resources:
    """Amounts by the names of the resources.

    Args:
        gpu: name of the resource that GPUs are.
    """
    return common_pb2.Resources(
        cpu=amounts.get("cpu", 0),
        memory_bytes=int(amounts.get("memory", 0)),
        gpu=int(amounts.get(gpu, 0)),
        pods=int(amounts.get("pods", 0)),
    )


def amount(text: str) -> float:
    """A quantity of Kubernetes as a number: "500m" is 0.5, "1Ki" is 1024."""
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text)
