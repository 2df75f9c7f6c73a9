"""Which machines a job accepts, and which accept it: labels, taints and tolerations, as Kubernetes decides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Taint(NamedTuple):
    """Keeps nodes of attempts away from a machine."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"

    def __str__(self) -> str:
        value = f"={self.value}" if self.value else ""
        return f"{self.key}{value}:{self.effect}"


class Toleration(NamedTuple):
    """Lets nodes of an attempt go to a machine in spite of a taint. An empty key or effect stands for each."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        if self.effect not in ("", taint.effect):
            return False
        if self.operator == "Exists":
            return self.key in ("", taint.key)
        return (self.key, self.value) == (taint.key, taint.value)


class Wishes(NamedTuple):
    """What a job says about its machines."""

    selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    topology: str = ""  # where there is a choice: "spread" over machines, "pack" on few, or no matter
    avoided: frozenset[str] = frozenset()  # machines on which the cluster did not take it lately


NO_WISHES = Wishes()


def untolerated(taints: Sequence[Taint], tolerations: Sequence[Toleration]) -> list[Taint]:
    """The taints that none of the tolerations is for."""
    return [taint for taint in taints if not any(each.tolerates(taint) for each in tolerations)]


def selected(selector: Sequence[tuple[str, str]], labels: Mapping[str, str]) -> bool:
    """Whether a machine has the labels. One that announces none may have any."""
    return not labels or all(labels.get(key) == value for key, value in selector)
