"""What is kept of a Job, and what the cluster's warnings say about pods that are not there or cannot begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainyard_launcher.backend import Facts
from trainyard_launcher.backends.kubernetes import names
from trainyard_launcher.backends.kubernetes.pods import Trouble, create_trouble, mount_trouble

_MOUNT_REASONS = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})


@dataclass(frozen=True, slots=True)
class JobState:
    """What is kept of a Job."""

    name: str
    uid: str
    labels: Mapping[str, str]
    facts: Facts
    finished: bool

    @property
    def metadata(self) -> dict[str, Any]:
        """As much of its metadata as a Service needs that belongs to it."""
        return {"name": self.name, "uid": self.uid, "labels": dict(self.labels)}


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning about an object of ours."""

    kind: str  # Job | Pod
    name: str
    trouble: Trouble


def read(job: Mapping[str, Any]) -> JobState | None:
    """What is kept of a Job; None when no launcher made it."""
    metadata = job["metadata"]
    facts = names.facts_of(metadata)
    if facts is None:
        return None
    done = ("Complete", "Failed")
    conditions = job.get("status", {}).get("conditions", ())
    return JobState(
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        labels=metadata.get("labels", {}),
        facts=facts,
        finished=any(each["type"] in done and each["status"] == "True" for each in conditions),
    )


def read_warning(event: Mapping[str, Any]) -> Warned | None:
    """A warning that explains why a node does not begin; None for all others."""
    about, reason, message = event.get("involvedObject", {}), event.get("reason"), str(event.get("message", ""))
    if about.get("kind") == "Job" and reason == "FailedCreate":
        return Warned("Job", str(about.get("name", "")), create_trouble(message))
    if about.get("kind") == "Pod" and reason in _MOUNT_REASONS:
        return Warned("Pod", str(about.get("name", "")), mount_trouble(message))
    return None
