"""A TrainingJob resource as the operator knows it, and what is submitted for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainyard.spec import is_reserved_key
from trainyard.spec.resource import GROUP, PLURAL, VERSION
from trainyard_protos.v1 import scheduler_pb2 as pb

FINALIZER = f"{GROUP}/job"
"""Keeps a resource until its job is over."""
OPERATOR = f"{GROUP}/operator"
"""Annotation: the operator that took a resource, and the resource's uid, so that a copy of it is nobody's yet."""


@dataclass(frozen=True, slots=True)
class Resource:
    """What a resource says.

    Attributes:
        version: of this state of it; greater is newer.
        generation: of its spec.
        document: what is submitted, as JSON; "" once it was.
        operator: the one that took it; "" for none yet.
        best: metric whose best value is shown, and "max" or "min"; None for none.
    """

    uid: str
    namespace: str
    name: str
    version: int
    generation: int
    deleting: bool
    finalizers: tuple[str, ...]
    status: Mapping[str, Any] = field(repr=False)
    document: str = field(repr=False)
    operator: str = ""
    best: tuple[str, str] | None = None

    @property
    def held(self) -> bool:
        """Whether it stays until the operator lets it go."""
        return FINALIZER in self.finalizers

    def taken_by(self, operator: str) -> bool:
        """Whether it is this operator's, and stays until that lets it go."""
        return self.held and self.operator == operator

    @property
    def path(self) -> str:
        """Where the API server has it."""
        return f"/apis/{GROUP}/{VERSION}/namespaces/{self.namespace}/{PLURAL}/{self.name}"

    def submitted(self) -> Resource:
        """The same without its document, which is kept only while it may be needed."""
        return replace(self, document="")


def read(body: Mapping[str, Any]) -> Resource:
    """A resource as the API server sends it."""
    metadata, status = body["metadata"], body.get("status") or {}
    spec = body.get("spec") or {}
    best = ((spec.get("checkpoints") or {}).get("keep") or {}).get("best")
    return Resource(
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        version=int(metadata["resourceVersion"]),
        generation=int(metadata.get("generation", 0)),
        deleting="deletionTimestamp" in metadata,
        finalizers=tuple(metadata.get("finalizers") or ()),
        status=status,
        document="" if status.get("jobId") else document(body),
        operator=_operator(metadata),
        best=(best["metric"], best["mode"]) if best else None,
    )


def taken(operator: str, uid: str) -> dict[str, str]:
    """The annotation with which an operator takes a resource."""
    return {OPERATOR: f"{operator}/{uid}"}


def _operator(metadata: Mapping[str, Any]) -> str:
    operator, _, uid = (metadata.get("annotations") or {}).get(OPERATOR, "").rpartition("/")
    return operator if uid == metadata["uid"] else ""


def document(body: Mapping[str, Any]) -> str:
    """The job file that the resource is: without what the cluster added to it.

    Of its annotations those of Kubernetes and the yard say something of the resource: `kubectl apply` keeps the whole
    document in one.
    """
    metadata = body["metadata"]
    annotations = {key: text for key, text in (metadata.get("annotations") or {}).items() if not is_reserved_key(key)}
    said = {"name": metadata["name"], "labels": metadata.get("labels") or {}, "annotations": annotations}
    return json.dumps(
        {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": said, "spec": body.get("spec") or {}}
    )


def submit_request(resource: Resource, *, secrets_checked: bool = False) -> pb.SubmitRequest:
    """The uid is the idempotency key: however often this is sent, it is one job.

    Args:
        secrets_checked: the API server checked that its author may read its Secrets.
    """
    where = f"{resource.namespace}/{resource.name}"
    return pb.SubmitRequest(
        document=pb.Document(text=resource.document, filename=where),
        idempotency_key=resource.uid,
        secrets_checked=secrets_checked,
    )
