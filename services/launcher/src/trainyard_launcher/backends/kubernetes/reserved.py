"""Names that no job may use, because they are the yard's own: where jobs run beside it, they would read its keys.

A namespace of their own for jobs is the better guard; this one holds where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from trainyard.spec import Kubernetes, Spec

from trainyard_launcher.backend import StartError
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
    for secret in spec.secrets:
        if secret.from_.secret is not None:
            yield "spec.secrets", secret.from_.secret.name, "VolumeUnavailable"
    wishes = spec.kubernetes or Kubernetes()
    for volume in wishes.volumes:
        for name in (volume.secret, volume.persistent_volume_claim):
            if name is not None:
                yield "spec.kubernetes.volumes", name, "VolumeUnavailable"
    for name in wishes.pull_secrets:
        yield "spec.kubernetes.pullSecrets", name, "ImageUnavailable"
    account = wishes.service_account
    if account and account != settings.kubernetes_service_account:
        yield "spec.kubernetes.serviceAccount", account, "PodsRefused"
