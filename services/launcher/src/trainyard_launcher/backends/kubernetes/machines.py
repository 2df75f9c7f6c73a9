"""The cluster's nodes as machines: what they offer, and whether they are well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard_protos.v1 import common_pb2, scheduler_pb2

from trainyard_launcher.settings import Settings

_KEEP_AWAY = ("NoSchedule", "NoExecute")
_BYTES = {f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("KMGTPE", 1)}
_BYTES |= {prefix: 10 ** (3 * power) for power, prefix in enumerate("kMGTPE", 1)}


@dataclass(frozen=True, slots=True)
class Machine:
    """What is kept of a node of the cluster."""

    name: str
    ready: bool
    open: bool  # takes pods without a toleration
    cpu: float
    memory_bytes: int
    resources: Mapping[str, int]


def read(node: Mapping[str, Any]) -> Machine:
    """A node's readiness and what pods can have of it."""
    status, spec = node.get("status", {}), node.get("spec", {})
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", ()))
    tainted = any(each.get("effect") in _KEEP_AWAY for each in spec.get("taints", ()))
    amounts = status.get("allocatable", {})
    return Machine(
        name=str(node["metadata"]["name"]),
        ready=ready,
        open=not spec.get("unschedulable", False) and not tainted,
        cpu=_cores(str(amounts.get("cpu", "0"))),
        memory_bytes=_bytes(str(amounts.get("memory", "0"))),
        resources={name: int(value) for name, value in amounts.items() if "/" in name and str(value).isdigit()},
    )


def offered(machines: Iterable[Machine], settings: Settings) -> list[scheduler_pb2.Machine]:
    """What the scheduler may count on: the machines that take pods, less the agent's own share of each."""
    return [
        scheduler_pb2.Machine(
            name=each.name,
            total=common_pb2.Resources(
                cpu=max(each.cpu - settings.agent_cpu, 0),
                memory_bytes=max(each.memory_bytes - settings.agent_memory, 0),
                gpu=each.resources.get(settings.kubernetes_gpu_resource, 0),
            ),
        )
        for each in sorted(machines, key=lambda each: each.name)
        if each.ready and each.open
    ]


def _cores(text: str) -> float:
    for unit, factor in (("m", 1e-3), ("u", 1e-6), ("n", 1e-9)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text)


def _bytes(text: str) -> int:
    for unit, factor in _BYTES.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(float(text.removesuffix("m")) / 1000) if text.endswith("m") else int(float(text))
