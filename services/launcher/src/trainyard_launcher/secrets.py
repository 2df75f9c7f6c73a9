"""Secrets of a job, read where its processes will run. Their values go to the agents and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainyard.spec import SecretSource, TrainingJob

_MAX_BYTES = 64 * 1024
_OWN = "TRAINYARD_"  # variables that set up the launcher; one is the address of the broker, with its password


class SecretUnavailable(Exception):
    """A secret cannot be read on this machine."""


def resolve(job: TrainingJob, environ: Mapping[str, str] = os.environ, *, cluster: bool = False) -> dict[str, str]:
    """The job's secrets as environment variables.

    Args:
        cluster: the job runs on a cluster, which gives pods the keys of its own Secrets: those are not read here. Files
            and settings of the launcher's pod are no user's: the key that signs attempts' tokens is among them.

    Raises:
        SecretUnavailable: one is missing, not text or not to be had here; the message names it, not its value.
    """
    wanted = [secret for secret in job.spec.secrets if not (cluster and secret.from_.secret)]
    for secret in wanted if cluster else ():
        _refuse_own(secret.name, secret.from_)
    return {secret.name: _read(secret.name, secret.from_, environ) for secret in wanted}


def _refuse_own(name: str, source: SecretSource) -> None:
    if source.file or (source.env or "").startswith(_OWN):
        raise SecretUnavailable(
            f"secret {name}: {source.file or source.env} is the launcher's own, and on a cluster no job is given that; "
            "take it from a Secret in the namespace of the jobs (from.secret)"
        )


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
