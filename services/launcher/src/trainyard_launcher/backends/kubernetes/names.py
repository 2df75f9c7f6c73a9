"""Labels, annotations and names of what the launcher makes in a cluster: by them it is found again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from pydantic import TypeAdapter
from servicekit.ownership import LAUNCHER, identity_label
from trainyard.spec import is_reserved_key

from trainyard_launcher.backend import Facts

PREFIX = "trainyard.dev"
MANAGED_BY = "app.kubernetes.io/managed-by"
OURS = "trainyard"
JOB, JOB_ID, ATTEMPT_ID = f"{PREFIX}/job", f"{PREFIX}/job-id", f"{PREFIX}/attempt-id"
FENCE, WORKSPACE, POOL = f"{PREFIX}/fence", f"{PREFIX}/workspace", f"{PREFIX}/pool"
FACTS = f"{PREFIX}/facts"
KEPT = f"{PREFIX}/kept"  # annotation of a Job that is over for the yard, and is kept for people
INDEX = "batch.kubernetes.io/job-completion-index"

_RESERVED = frozenset({"job-name", "controller-uid"})  # by which Kubernetes selected pods of Jobs
_NAME_MOST = 40  # a pod's host name, `<name>-<12 of the attempt>-<index>`, has at most 63 characters
_LABEL_MOST = 63
_FACTS = TypeAdapter(Facts)


def object_name(facts: Facts) -> str:
    """Name of an attempt's Job and Service: the job's, so that people know it, and enough of the attempt's id."""
    readable = re.sub(r"[^a-z0-9-]+", "-", facts.job_name.lower())[:_NAME_MOST].strip("-") or "job"
    # A Service's name begins with a letter.
    readable = readable if readable[0].isalpha() else f"j{readable}"[:_NAME_MOST]
    return f"{readable}-{facts.attempt_id.replace('-', '')[-12:]}"


def labels(facts: Facts, pool: str, identity: str) -> dict[str, str]:
    """What an attempt's objects are found by.

    Args:
        identity: of the launcher that makes them.
    """
    return {
        MANAGED_BY: OURS,
        LAUNCHER: identity_label(identity),
        JOB: label_value(facts.job_name),
        JOB_ID: facts.job_id,
        ATTEMPT_ID: facts.attempt_id,
        FENCE: str(facts.fence),
        WORKSPACE: label_value(facts.workspace),
        POOL: label_value(pool),
    }


def users_own(written: Mapping[str, str]) -> dict[str, str]:
    """Those of a job's own labels or annotations that its objects carry as well.

    Others would make a pod something that it is not: Kubernetes and the yard select by them. Beside the yard, a pod
    labelled like the gateway would receive its connections.
    """
    return {key: value for key, value in written.items() if not is_reserved_key(key) and key not in _RESERVED}


def selector(pool: str) -> str:
    """Selects what launchers of a pool of this name have made: `owned_by` says which of them did."""
    return f"{MANAGED_BY}={OURS},{POOL}={label_value(pool)}"


def label_value(text: str) -> str:
    """The text as a label's value, as far as it may be one."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:_LABEL_MOST].strip("-_.")


def facts_to(facts: Facts) -> str:
    """Facts as an annotation."""
    return json.dumps(asdict(facts))


def facts_of(metadata: dict[str, Any]) -> Facts | None:
    """The facts in an object's annotations, without what a later version knows beside; None when they are none."""
    try:
        written = json.loads(metadata["annotations"][FACTS])
        return _FACTS.validate_python({each.name: written[each.name] for each in fields(Facts) if each.name in written})
    except (KeyError, TypeError, ValueError):
        return None
