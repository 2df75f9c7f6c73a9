"""What is kept of a Job, and what the cluster's warnings say about pods that are not there or cannot begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainyard_launcher.backend import Facts
from trainyard_launcher.backends.kubernetes import manifests, names
from trainyard_launcher.backends.kubernetes.pods import Trouble, create_trouble, mount_trouble

_MOUNT_REASONS = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})


@dataclass(frozen=True, slots=True)
class JobState:
    """What is kept of a Job."""

    name: str
    uid: str
    labels: Mapping[str, str]
    facts: Facts | None  # None when neither annotation nor labels say what it is
    rebuilt: bool  # facts are what the labels say, for the annotation cannot be read
    finished: bool
    deleting: bool
    kept: bool  # for people: nothing is left to be done for it

    @property
    def ending(self) -> bool:
        """Whether what belongs to it is, or will be, taken away."""
        return self.finished or self.deleting

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


def read(job: Mapping[str, Any]) -> JobState:
    """What is kept of a Job that a launcher made."""
    metadata = job["metadata"]
    facts = names.facts_of(metadata)
    done = ("Complete", "Failed")
    conditions = job.get("status", {}).get("conditions", ())
    return JobState(
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        labels=metadata.get("labels", {}),
        facts=facts or _rebuilt(job),
        rebuilt=facts is None,
        finished=any(each["type"] in done and each["status"] == "True" for each in conditions),
        deleting="deletionTimestamp" in metadata,
        kept=names.KEPT in metadata.get("annotations", {}),
    )


def _rebuilt(job: Mapping[str, Any]) -> Facts | None:
    """The facts as far as labels and spec have them: without deadline, and with one worker a node."""
    labels, spec = job["metadata"].get("labels", {}), job.get("spec", {})
    try:
        return Facts(
            workspace=labels[names.WORKSPACE],
            job_id=labels[names.JOB_ID],
            job_name=labels[names.JOB],
            attempt_id=labels[names.ATTEMPT_ID],
            fence=int(labels[names.FENCE]),
            nodes=int(spec["completions"]),
            workers_per_node=1,
            grace_s=manifests.grace_within(spec["template"]["spec"]["terminationGracePeriodSeconds"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def read_warning(event: Mapping[str, Any]) -> Warned | None:
    """A warning that explains why a node does not begin; None for all others."""
    about, reason, message = event.get("involvedObject", {}), event.get("reason"), str(event.get("message", ""))
    if about.get("kind") == "Job" and reason == "FailedCreate":
        return Warned("Job", str(about.get("name", "")), create_trouble(message))
    if about.get("kind") == "Pod" and reason in _MOUNT_REASONS:
        return Warned("Pod", str(about.get("name", "")), mount_trouble(message))
    return None
