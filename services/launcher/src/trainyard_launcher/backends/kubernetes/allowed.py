"""What jobs may ask for here. Checked at launch as well: at submit, the scheduler may know no pool."""

from __future__ import annotations

from trainyard.spec import Kubernetes, Spec
from trainyard.spec.allowed import AllowedPods, not_allowed

from trainyard_launcher.backend import StartError
from trainyard_launcher.settings import Settings


def check(spec: Spec, settings: Settings) -> None:
    """Raises StartError (NotAllowed) when a job asks for a priority class or a toleration that is not allowed here."""
    problems = list(not_allowed(spec.kubernetes or Kubernetes(), allowed_pods(settings)))
    if problems:
        raise StartError("; ".join(map(str, problems)), "NotAllowed")


def allowed_pods(settings: Settings) -> AllowedPods:
    """What the settings allow."""
    return AllowedPods(
        _patterns(settings.kubernetes_allowed_priority_classes), _patterns(settings.kubernetes_allowed_tolerations)
    )


def _patterns(setting: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in setting.split(",") if each.strip())
