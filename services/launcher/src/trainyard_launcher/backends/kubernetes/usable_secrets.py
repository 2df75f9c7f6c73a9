"""Secrets of the cluster that a job may name without a check of its author's permission to read them.

A caller of the yard has no identity in the cluster. So a job that did not come by a checked TrainingJob gets only
Secrets that carry a label, which says that every user of the yard may have them.
"""

from __future__ import annotations

import asyncio
from functools import partial

from trainyard.cluster import Api, ApiError

from trainyard_launcher.backend import Launch, StartError
from trainyard_launcher.backends.kubernetes.patience import patiently
from trainyard_launcher.backends.kubernetes.secret_names import secret_names
from trainyard_launcher.settings import Settings

LABEL = "trainyard.dev/usable"
REASON = "SecretUnavailable"
_NOT_FOUND = 404


async def check(api: Api, settings: Settings, launch: Launch) -> None:
    """Returns when the job may have every Secret that it names; waits for an API server that is away.

    Raises:
        StartError: SecretUnavailable: it may not have one, or the launcher may not look.
    """
    if launch.secrets_checked or launch.spec is None:
        return
    fields = {name: field for field, name, _ in reversed(list(secret_names(launch.spec)))}
    found = await asyncio.gather(*(_problem(api, settings, field, name) for name, field in fields.items()))
    problems = [problem for problem in reversed(found) if problem]
    if problems:
        raise StartError("; ".join(problems), REASON)


async def _problem(api: Api, settings: Settings, field: str, name: str) -> str:
    """Why a job may not have a Secret; "" when it may."""
    namespace = settings.kubernetes_namespace
    path = f"/api/v1/namespaces/{namespace}/secrets/{name}"
    try:
        found = await patiently(partial(api.metadata, path), settings.connect_s)
    except ApiError as error:
        if error.status == _NOT_FOUND:
            return f"{field}: there is no Secret '{name}' in namespace {namespace}"
        return (
            f"{field}: whether jobs may use the Secret '{name}' cannot be found out: {error}; the launcher needs the "
            f"permission to get Secrets in namespace {namespace}"
        )
    if (found["metadata"].get("labels") or {}).get(LABEL) == "true":
        return ""
    return (
        f"{field}: jobs that are submitted to the yard get no Secret without the label {LABEL}=true, and '{name}' in "
        f"namespace {namespace} has none. Apply the job with kubectl as somebody who may get the Secret, or let every "
        f"user of the yard have it: kubectl label secret {name} --namespace={namespace} {LABEL}=true"
    )
