"""What jobs may ask for only as far as an administrator allows it: priority classes and tolerations.

A priority class lets pods evict those of others. A toleration leads them to machines that were set aside, for instance
for the control plane.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from trainyard.spec.cluster import Kubernetes
from trainyard.spec.problems import Problem

_EVERY_TAINT = "*"
_CLASSES = (
    "an administrator allows classes with jobs.allowed.priorityClasses of the chart; the order of jobs in the queue is "
    "spec.priority"
)
_KEYS = "an administrator allows keys of taints with jobs.allowed.tolerations of the chart"


class AllowedPods(NamedTuple):
    """What pods of jobs may have; "*" in a name stands for any characters.

    Attributes:
        priority_classes: names of PriorityClasses.
        tolerations: keys of taints; "*" alone stands for every taint.
    """

    priority_classes: tuple[str, ...] = ()
    tolerations: tuple[str, ...] = ()


def not_allowed(wishes: Kubernetes, allowed: AllowedPods) -> Iterator[Problem]:
    """Yields what a job asks for that is not allowed."""
    wanted = wishes.priority_class
    if wanted is not None and not _matches(wanted, allowed.priority_classes):
        yield _problem("priorityClass", wanted, f"'{wanted}' is not allowed: {_CLASSES}", allowed.priority_classes)
    for index, toleration in enumerate(wishes.tolerations):
        field, key = f"tolerations[{index}]", toleration.key
        if key is None and _EVERY_TAINT not in allowed.tolerations:
            yield _problem(field, "", "tolerates every taint: name the key of one", allowed.tolerations)
        elif key is not None and not _matches(key, allowed.tolerations):
            yield _problem(f"{field}.key", key, f"'{key}' is not allowed: {_KEYS}", allowed.tolerations)


def _problem(field: str, value: str, message: str, allowed: tuple[str, ...]) -> Problem:
    names = ", ".join(allowed) or "none"
    return Problem(field=f"spec.kubernetes.{field}", value=value, message=message, allowed=names)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) for pattern in patterns)
