"""What a removal leaves in the status of TrainingJob resources whose jobs were not over: nothing of them runs any more,
and no operator will say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard.spec.resource import OVER, UNMANAGED

REASON = "OperatorUninstalled"
_MESSAGE = (
    "the yard '{}' was uninstalled, and the pods of this job were deleted. Install it again under the same name, with "
    "the data that it left, and the job continues; or delete this resource"
)
_VERDICTS = {"Running": "False", "Finished": "True", "Succeeded": "False", "Failed": "False"}


def of_uninstalled(resource: Mapping[str, Any], operator: str, now: str) -> dict[str, Any]:
    """The patch of a resource's status; empty when its job is over, or it never became one of this operator's.

    Args:
        operator: identity of the operator that is removed.
        now: as Kubernetes writes times.
    """
    status = resource.get("status") or {}
    if not status.get("jobId") or status.get("phase") in {*OVER, UNMANAGED}:
        return {}
    why = {"reason": REASON, "message": _MESSAGE.format(operator)}
    before = {each["type"]: each for each in status.get("conditions") or ()}
    conditions = before | {
        kind: {
            "type": kind,
            "status": verdict,
            "lastTransitionTime": _since(before.get(kind, {}), verdict, now),
            "observedGeneration": resource["metadata"].get("generation", 0),
            **why,
        }
        for kind, verdict in _VERDICTS.items()
    }
    said = {"phase": UNMANAGED, "timeLeft": None, "conditions": list(conditions.values())}
    return {"metadata": {"uid": resource["metadata"]["uid"]}, "status": said | why}


def _since(condition: Mapping[str, Any], verdict: str, now: str) -> str:
    return str(condition["lastTransitionTime"]) if condition.get("status") == verdict else now
