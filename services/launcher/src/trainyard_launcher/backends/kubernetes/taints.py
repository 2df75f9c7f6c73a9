"""Taints, by which nodes keep pods away, and tolerations, by which pods go there all the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trainyard_protos.v1 import scheduler_pb2

_OF_CONDITIONS = (
    "node.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/",
)
_KEEP_AWAY = ("NoSchedule", "NoExecute")
Toleration = Mapping[str, Any]


class Taint(NamedTuple):
    """What keeps pods away from a node."""

    key: str
    value: str
    effect: str


def read(node_spec: Mapping[str, Any]) -> tuple[Taint, ...]:
    """The taints of a node that keep pods away; those of the effect PreferNoSchedule do not."""
    found = (
        Taint(str(each["key"]), str(each.get("value", "")), str(each.get("effect", "")))
        for each in node_spec.get("taints", ())
    )
    return tuple(taint for taint in found if taint.effect in _KEEP_AWAY)


def untolerated(taints: Iterable[Taint], tolerations: Sequence[Toleration]) -> list[Taint]:
    """The taints of a node that keep a pod with these tolerations away, as Kubernetes decides it."""
    return [taint for taint in taints if not any(_matches(each, taint) for each in tolerations)]


def passing(taint: Taint) -> bool:
    """Whether a taint says how a node is at the moment, as Kubernetes and autoscalers do, and not whom it is for."""
    return taint.key.startswith(_OF_CONDITIONS)


def messages(taints: Iterable[Taint]) -> list[scheduler_pb2.Taint]:
    """Taints as the scheduler is told of them."""
    return [scheduler_pb2.Taint(key=each.key, value=each.value, effect=each.effect) for each in taints]


def of_gpus(resource: str) -> Toleration:
    """Lets a pod go to nodes that are for pods with GPUs, which by custom have a taint of the resource's name."""
    return {"key": resource, "operator": "Exists", "effect": "NoSchedule"}


def toleration_messages(tolerations: Iterable[Toleration]) -> list[scheduler_pb2.Toleration]:
    """Tolerations as the scheduler is told of them."""
    return [
        scheduler_pb2.Toleration(
            key=each.get("key") or "",
            operator=each.get("operator") or "Equal",
            value=each.get("value") or "",
            effect=each.get("effect") or "",
        )
        for each in tolerations
    ]


def _matches(toleration: Toleration, taint: Taint) -> bool:
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.key)
    return (toleration.get("key"), toleration.get("value") or "") == (taint.key, taint.value)
