"""When a machine counts as lost.

Kubernetes says that it is not ready, or has no such node any more, and its agents are silent while others are heard.
One alone is not enough: a node whose kubelet hangs may train on well, and a launcher that hears nobody is itself cut
off. When most machines seem lost at once, the fault is in what connects them: then nobody is evicted, by the same rule
as in Kubernetes' own node lifecycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

_TOO_MANY_SHARE, _TOO_MANY = 0.55, 3


def lost(ready: Mapping[str, bool], silent_s: Mapping[str, Sequence[float]], limit_s: float) -> Set[str]:
    """The machines that are lost.

    Args:
        ready: whether each node of the cluster is.
        silent_s: by machine, for how long each of its agents has said nothing.
        limit_s: how long counts as silence.
    """
    suspects = {name for name in silent_s if not ready.get(name, False)}
    if not suspects or disrupted(ready):
        return frozenset()
    others = [each for name, agents in silent_s.items() if name not in suspects for each in agents]
    if others and min(others) >= limit_s:
        return frozenset()
    return frozenset(name for name in suspects if min(silent_s[name], default=limit_s) >= limit_s)


def disrupted(ready: Mapping[str, bool]) -> bool:
    """Whether so many nodes are not ready that it is not the nodes."""
    unready = sum(not each for each in ready.values())
    if unready == len(ready):
        return True
    return unready >= _TOO_MANY and unready / len(ready) >= _TOO_MANY_SHARE
