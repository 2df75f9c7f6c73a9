"""Names that no job may use, because they are the yard's own: where jobs run beside it, they would read its keys.

A namespace of their own for jobs is the better guard; this one holds where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from trainyard.spec import Kubernetes, Spec

from trainyard_launcher.backend import StartError
from trainyard_launcher.backends.kubernetes.secret_names import secret_names
from trainyard_launcher.settings import Settings


def check(spec: Spec, settings: Settings) -> None:
    """Raises StartError when a job names a secret, claim or account of this installation."""
    patterns = [each.strip() for each in settings.kubernetes_reserved_names.split(",") if each.strip()]
    for field, name, reason in _named(spec, settings):
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            raise StartError(
                f"{field}: '{name}' belongs to the yard itself, and no job may use it: name another, made for jobs "
                f"in namespace {settings.kubernetes_namespace}",
                reason,
            )


def _named(spec: Spec, settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Field, name, and the reason for an attempt's end, of all that a job asks for by name."""
    yield from secret_names(spec)
    wishes = spec.kubernetes or Kubernetes()
    for index, volume in enumerate(wishes.volumes):
        if volume.persistent_volume_claim is not None:
            field = f"spec.kubernetes.volumes[{index}].persistentVolumeClaim"
            yield field, volume.persistent_volume_claim, "VolumeUnavailable"
    account = wishes.service_account
    if account and account != settings.kubernetes_service_account:
        yield "spec.kubernetes.serviceAccount", account, "PodsRefused"
