"""Binds the pods of an attempt to their machines.

The pods of a Job have one template. Where all nodes go to one machine, or wait for one kind of machines, it says so.
Otherwise the pods are made with a scheduling gate: each is told its own machine once it is there, and the gate is taken
away with that. What a launcher that was killed left gated, the next one finds and tells.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from trainyard.cluster import Api, ApiError

from trainyard_launcher.backend import Facts
from trainyard_launcher.backends.kubernetes import kinds, names, placement, pods
from trainyard_launcher.scheduler import backoff

logger = logging.getLogger(__name__)

GATE = f"{names.PREFIX}/machine"


class Target(NamedTuple):
    """Where a node goes: to a machine, to one of a kind, or with both empty wherever the cluster likes."""

    machine: str = ""
    kind: str = ""


def target(facts: Facts, node: int) -> Target:
    """The plan for a node; none for attempts of earlier versions."""
    planned = facts.machines[node] if node < len(facts.machines) else ""
    return Target(planned, facts.kinds[node] if node < len(facts.kinds) else "")


def bind_template(pod_spec: dict[str, Any], facts: Facts, known: Sequence[kinds.Kind]) -> None:
    """Puts into a Job's template where its pods go, or the gate."""
    targets = {target(facts, node) for node in range(facts.nodes)}
    if len(targets) == 1:
        _bind(pod_spec, targets.pop(), known)
    else:
        pod_spec["schedulingGates"] = [*pod_spec.get("schedulingGates", ()), {"name": GATE}]


async def open_gate(api: Api, path: str, pod: pods.Pod, facts: Facts, known: Sequence[kinds.Kind]) -> str:
    """Binds a gated pod to its machine; waits for an API server that is away.

    Args:
        path: of the pod.

    Returns:
        Why the API server refuses it, so that the pod stays gated; "" when it is bound or gone.
    """
    spec: dict[str, Any] = {"affinity": pod.affinity}
    _bind(spec, target(facts, pod.node), known)
    spec["schedulingGates"] = [{"name": name} for name in pod.gates if name != GATE] or None
    for pause_s in backoff():
        try:
            await api.patch(path, {"spec": spec})
            return ""
        except ApiError as error:
            if error.status == 404:
                return ""
            if not error.away:
                logger.error("pod not bound to its machine", extra={"pod": pod.name, "why": str(error)})
                return str(error)
        await asyncio.sleep(pause_s)
    raise AssertionError("the pauses never end")


def _bind(pod_spec: dict[str, Any], to: Target, known: Sequence[kinds.Kind]) -> None:
    kind = kinds.named(known, to.kind)
    if to.machine:
        placement.bind(pod_spec, to.machine)
    elif kind is not None:
        placement.bind_to_kind(pod_spec, kind.labels)
