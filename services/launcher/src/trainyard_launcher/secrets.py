"""Secrets of a job, read where its processes will run. Their values go to the agents and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainyard.spec import SecretSource, TrainingJob

_MAX_BYTES = 64 * 1024


class SecretUnavailable(Exception):
    """A secret cannot be read on this machine."""


def resolve(job: TrainingJob, environ: Mapping[str, str] = os.environ, *, cluster: bool = False) -> dict[str, str]:
    """The job's secrets as environment variables.

    Args:
        cluster: the job runs on a cluster, which gives pods the keys of its own Secrets: those are not read here.

    Raises:
        SecretUnavailable: one is missing or not text; the message names it, not its value.
    """
    return {
        secret.name: _read(secret.name, secret.from_, environ)
        for secret in job.spec.secrets
        if not (cluster and secret.from_.secret)
    }


def _read(name: str, source: SecretSource, environ: Mapping[str, str]) -> str:
    variable, file = source.env, source.file
    if variable:
        if variable not in environ:
            raise SecretUnavailable(
                f"secret {name}: the yard's environment has no variable {variable}; export it, then restart the yard"
            )
        return environ[variable]
    if file is None:
        raise SecretUnavailable(
            f"secret {name}: a Secret of a Kubernetes cluster, and this yard runs on one machine; take it from a "
            "variable or a file (from.env, from.file)"
        )
    return _read_file(name, Path(file).expanduser())


def _read_file(name: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise SecretUnavailable(f"secret {name}: cannot read {path}: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise SecretUnavailable(f"secret {name}: {path} is larger than {_MAX_BYTES} bytes")
    try:
        return content.decode().rstrip("\n")
    except UnicodeDecodeError as error:
        raise SecretUnavailable(f"secret {name}: {path} is not text in UTF-8") from error
