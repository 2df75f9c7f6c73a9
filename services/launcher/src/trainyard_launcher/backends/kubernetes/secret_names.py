"""The Secrets of the cluster that a job names."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard.spec import Kubernetes, Spec


def secret_names(spec: Spec) -> Iterator[tuple[str, str, str]]:
    """Field, name, and the reason for an attempt's end when it cannot be used, of each Secret that a job names."""
    for index, secret in enumerate(spec.secrets):
        if secret.from_.secret is not None:
            yield f"spec.secrets[{index}].from.secret", secret.from_.secret.name, "VolumeUnavailable"
    wishes = spec.kubernetes or Kubernetes()
    for index, volume in enumerate(wishes.volumes):
        if volume.secret is not None:
            yield f"spec.kubernetes.volumes[{index}].secret", volume.secret, "VolumeUnavailable"
    for index, name in enumerate(wishes.pull_secrets):
        yield f"spec.kubernetes.pullSecrets[{index}]", name, "ImageUnavailable"
