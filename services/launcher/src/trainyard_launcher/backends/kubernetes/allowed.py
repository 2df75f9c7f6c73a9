"""What jobs may ask for only as far as this installation allows it: priority classes and tolerations.

A priority class lets pods evict those of others. A toleration leads them to machines that were set aside, for instance
for the control plane.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from trainyard.spec import Kubernetes, Spec

from trainyard_launcher.backend import StartError
from trainyard_launcher.settings import Settings

_EVERY_TAINT = "*"


def check(spec: Spec, settings: Settings) -> None:
    """Raises StartError (NotAllowed) when a job asks for a priority class or a toleration that is not allowed here."""
    problems = list(_problems(spec.kubernetes or Kubernetes(), settings))
    if problems:
        raise StartError("; ".join(problems), "NotAllowed")


def _problems(wishes: Kubernetes, settings: Settings) -> Iterator[str]:
    classes = _patterns(settings.kubernetes_allowed_priority_classes)
    wanted = wishes.priority_class
    if wanted is not None and not _matches(wanted, classes):
        yield (
            f"spec.kubernetes.priorityClass: '{wanted}' is not allowed; {_listed(classes)}; the order of jobs in the "
            "queue is spec.priority; an administrator allows classes with jobs.allowed.priorityClasses of the chart"
        )
    keys = _patterns(settings.kubernetes_allowed_tolerations)
    for index, toleration in enumerate(wishes.tolerations):
        if toleration.key is None and _EVERY_TAINT not in keys:
            yield (
                f"spec.kubernetes.tolerations[{index}]: tolerates every taint, which is not allowed; name the key of "
                f"the taint; {_listed(keys)}"
            )
        elif toleration.key is not None and not _matches(toleration.key, keys):
            yield (
                f"spec.kubernetes.tolerations[{index}].key: '{toleration.key}' is not allowed; {_listed(keys)}; an "
                "administrator allows keys of taints with jobs.allowed.tolerations of the chart"
            )


def _patterns(setting: str) -> list[str]:
    return [each.strip() for each in setting.split(",") if each.strip()]


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _listed(patterns: list[str]) -> str:
    return f"allowed: {', '.join(patterns) or 'none'}"
