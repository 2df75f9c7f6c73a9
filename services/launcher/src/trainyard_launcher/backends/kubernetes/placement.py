"""Where pods go: what the pod template says of machines, and the affinity that binds a pod to its machine.

Pure: from the JSON of pods and the labels of nodes to yes, no, or another JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Object = Mapping[str, Any]
Labels = Mapping[str, str]

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_OPERATORS: Mapping[str, Callable[[str | None, Sequence[str]], bool]] = {
    "In": lambda value, allowed: value in allowed,
    "NotIn": lambda value, allowed: value not in allowed,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
    "Gt": lambda value, allowed: _number(value) is not None and _number(value) > _number(allowed[0]),  # type: ignore[operator]
    "Lt": lambda value, allowed: _number(value) is not None and _number(value) < _number(allowed[0]),  # type: ignore[operator]
}


def accepts(pod_spec: Object, name: str, labels: Labels) -> bool:
    """Whether a pod's node selector and required node affinity let it go to a node."""
    if any(labels.get(key) != value for key, value in (pod_spec.get("nodeSelector") or {}).items()):
        return False
    affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get(_REQUIRED) or {}).get("nodeSelectorTerms")
    return terms is None or any(_matches(term, name, labels) for term in terms)


def _matches(term: Object, name: str, labels: Labels) -> bool:
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False  # as in Kubernetes: an empty term selects nothing
    return all(_holds(each, labels.get(each["key"])) for each in expressions) and all(
        _holds(each, name) for each in fields
    )


def _holds(expression: Object, value: str | None) -> bool:
    holds = _OPERATORS.get(expression["operator"])
    return holds is not None and holds(value, expression.get("values") or ())


def _number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None


def bind(pod_spec: dict[str, Any], machine: str) -> None:
    """Lets a pod go to this node alone."""
    _require(pod_spec, fields=[{"key": "metadata.name", "operator": "In", "values": [machine]}])


def bind_to_kind(pod_spec: dict[str, Any], labels: Labels) -> None:
    """Lets a pod go to nodes with these labels alone."""
    _require(
        pod_spec,
        expressions=[{"key": key, "operator": "In", "values": [value]} for key, value in sorted(labels.items())],
    )


def avoid(pod_spec: dict[str, Any], names: Iterable[str]) -> None:
    """Keeps a pod away from nodes, by their names."""
    _require(
        pod_spec, fields=[{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in sorted(names)]
    )


def _require(pod_spec: dict[str, Any], *, expressions: Sequence[Object] = (), fields: Sequence[Object] = ()) -> None:
    """Adds to what each node has to fulfil. Terms are alternatives: those of the template stay, and each gets more."""
    if not expressions and not fields:
        return
    affinity = dict(pod_spec.get("affinity") or {})
    node_affinity = dict(affinity.get("nodeAffinity") or {})
    terms = (node_affinity.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    required = [
        term
        | ({"matchExpressions": [*(term.get("matchExpressions") or ()), *expressions]} if expressions else {})
        | ({"matchFields": [*(term.get("matchFields") or ()), *fields]} if fields else {})
        for term in terms
    ]
    node_affinity[_REQUIRED] = {"nodeSelectorTerms": required}
    pod_spec["affinity"] = affinity | {"nodeAffinity": node_affinity}
