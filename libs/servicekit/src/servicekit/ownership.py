"""Whose the objects of jobs are, in a cluster where several yards may share a namespace and a pool's name.

The launcher writes its identity on everything it makes. What was made before it did so is recognised by the endpoint
that its pods were given: no two yards have the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

LAUNCHER = "trainyard.dev/launcher"
"""Label: the identity of the launcher that made an object."""
ENDPOINT_VARIABLE = "TRAINYARD_ENDPOINT"
"""Tells an agent in a pod where its yard is."""

_LABEL_MOST = 63
_DIGEST_CHARACTERS = 12


def identity_label(identity: str) -> str:
    """An identity as a label's value; one that is none itself ends in a digest, so that no two become the same."""
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", identity)[:_LABEL_MOST].strip("-_.")
    if readable == identity:
        return identity
    digest = hashlib.sha256(identity.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{readable[: _LABEL_MOST - _DIGEST_CHARACTERS - 1]}-{digest}".lstrip("-")


def owned_by(found: Mapping[str, Any], identity: str, endpoint: str) -> bool:
    """Whether a launcher made an object.

    Args:
        found: a Job or a Pod, as the API server writes it.
        identity: of the launcher.
        endpoint: host:port that it gives to its pods.
    """
    label = (found["metadata"].get("labels") or {}).get(LAUNCHER)
    return label == identity_label(identity) if label is not None else endpoint in _endpoints(found)


def _endpoints(found: Mapping[str, Any]) -> Iterator[str]:
    spec = found.get("spec") or {}
    pod = spec["template"].get("spec") or {} if "template" in spec else spec
    for container in pod.get("containers") or ():
        for variable in container.get("env") or ():
            if variable["name"] == ENDPOINT_VARIABLE:
                yield str(variable.get("value", ""))
