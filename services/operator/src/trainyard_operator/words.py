"""Events of a job as events of its resource, for `kubectl describe`."""

from __future__ import annotations

from typing import Any

from trainyard.spec.model import API_VERSION, KIND
from trainyard_protos.v1 import scheduler_pb2 as pb

from trainyard_operator.resource import Resource
from trainyard_operator.status import TROUBLES, moment

_TOLD = {
    "Submitted": "Normal",
    "Running": "Normal",
    "Requeued": "Warning",
    "Succeeded": "Normal",
    "Failed": "Warning",
    "Cancelled": "Normal",
    "RetriedByUser": "Normal",
}
"""Those that a user of the cluster wants to see, with Kubernetes' word for how bad they are."""
_PLAIN = {
    "Submitted": "the yard has it as job {job}: 'yard logs -f {job}'",
    "Running": "the workers of attempt {attempt} run",
}
_COMPONENT = "trainyard-operator"
_MESSAGE = 1000


def told(event: pb.Event) -> bool:
    """Whether it becomes an event of the resource."""
    return event.type in _TOLD or (event.type == "Note" and bool(event.message))


def of_event(event: pb.Event, resource: Resource) -> dict[str, Any]:
    """An Event of the cluster. Its name follows from the event's number: telling it twice is telling it once."""
    note = event.type == "Note"
    severity = ("Warning" if event.reason in TROUBLES else "Normal") if note else _TOLD[event.type]
    reason = (event.reason or "Note") if note else event.type
    because = "" if note or event.message.startswith(event.reason) else event.reason
    said = ": ".join(filter(None, (because, event.message)))
    message = said or _PLAIN.get(event.type, "job {job}").format(job=event.object_id, attempt=event.attempt)
    return _event(f"{event.seq:x}", reason, message, severity, moment(event.time_ns) or "", resource)


def of_refusal(reason: str, message: str, now: str, resource: Resource) -> dict[str, Any]:
    """The event of a resource that the yard refused."""
    return _event(f"refused-{resource.generation}", reason, message, "Warning", now, resource)


def _event(suffix: str, reason: str, message: str, severity: str, when: str, resource: Resource) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{resource.name}.{resource.uid[:8]}.{suffix}", "namespace": resource.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": resource.name,
            "namespace": resource.namespace,
            "uid": resource.uid,
        },
        "type": severity,
        "reason": reason,
        "message": message[:_MESSAGE],
        "source": {"component": _COMPONENT},
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }
