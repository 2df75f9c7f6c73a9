"""Taints, by which nodes keep pods away, and tolerations, by which pods go there all the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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


def tolerated(taints: Iterable[Taint], tolerations: Sequence[Toleration]) -> bool:
    """Whether a pod with these tolerations may go to a node with these taints, as Kubernetes decides it."""
    return all(any(_matches(each, taint) for each in tolerations) for taint in taints)


def of_gpus(resource: str) -> Toleration:
    """Lets a pod go to nodes that are for pods with GPUs, which by custom have a taint of the resource's name."""
    return {"key": resource, "operator": "Exists", "effect": "NoSchedule"}


def _matches(toleration: Toleration, taint: Taint) -> bool:
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.key)
    return (toleration.get("key"), toleration.get("value") or "") == (taint.key, taint.value)
