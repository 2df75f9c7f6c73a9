"""When a machine counts as lost.

Kubernetes says that it is not ready, or has no such node any more, or its kubelet does not renew its lease, and its
agents are silent while others are heard. One alone is not enough: a node whose kubelet hangs may train on well, and a
launcher that hears nobody is itself cut off. When most machines seem lost at once, the fault is in what connects them:
then nobody is evicted, by the same rule as in Kubernetes' own node lifecycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

_TOO_MANY_SHARE, _TOO_MANY = 0.55, 3
Silences = Mapping[str, Sequence[float]]
"""By machine, for how long each of its agents has said nothing, in seconds."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The machines that are lost, and those that seem so together with too many others."""

    lost: Set[str] = frozenset()
    held: Set[str] = frozenset()


def judge(ready: Mapping[str, bool], stale: Set[str], silent_s: Silences, limit_s: float) -> Judgement:
    """Which machines are lost.

    Args:
        ready: whether each node of the cluster is.
        stale: the nodes whose kubelets do not renew their lease.
        silent_s: of the machines that run agents.
        limit_s: how long counts as silence.
    """
    away = {name for name in silent_s if not ready.get(name, False) or name in stale}
    seem = away & silent(silent_s, limit_s)
    if not seem:
        return Judgement()
    others = [each for name, agents in silent_s.items() if name not in away for each in agents]
    cut_off = bool(others) and min(others) >= limit_s
    if cut_off or disrupted({name: well and name not in stale for name, well in ready.items()}):
        return Judgement(held=seem)
    return Judgement(lost=seem)


def silent(silent_s: Silences, limit_s: float) -> Set[str]:
    """The machines of which no agent was heard for so long."""
    return {name for name, agents in silent_s.items() if min(agents, default=limit_s) >= limit_s}


def disrupted(well: Mapping[str, bool]) -> bool:
    """Whether so many nodes are not well that it is not the nodes."""
    unwell = sum(not each for each in well.values())
    if unwell == len(well):
        return True
    return unwell >= _TOO_MANY and unwell / len(well) >= _TOO_MANY_SHARE
