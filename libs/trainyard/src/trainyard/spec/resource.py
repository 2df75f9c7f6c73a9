"""The custom resource: a `TrainingJob` document as Kubernetes keeps it, and its status, which the operator writes."""

from __future__ import annotations

from typing import Any, Final

from trainyard.spec import cel
from trainyard.spec.model import API_VERSION, KIND
from trainyard.spec.schema import Schema, structural_schema

GROUP, _, VERSION = API_VERSION.partition("/")
PLURAL: Final = "trainingjobs"
SHORT_NAMES: Final = ("tj", "tjob")
PHASES: Final = (
    "Queued",
    "Starting",
    "Running",
    "Stopping",
    "Finalizing",
    "Succeeded",
    "Failed",
    "Cancelled",
    "Refused",
    "Unmanaged",
)
OVER: Final = ("Succeeded", "Failed", "Cancelled", "Refused")
"""Phases after which the operator writes nothing any more, unless a user acts."""
UNMANAGED: Final = "Unmanaged"
"""Phase of a resource whose operator was uninstalled before its job was over; written by the removal."""
_COLUMNS: Final = (
    ("Phase", "string", ".status.phase", 0),
    ("Reason", "string", ".status.reason", 0),
    ("Progress", "string", ".status.progress", 0),
    ("Left", "string", ".status.timeLeft", 0),
    ("Best", "string", ".status.best", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Job", "string", ".status.jobId", 1),
    ("Attempt", "integer", ".status.attempt", 1),
    ("Message", "string", ".status.message", 1),
)


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
            for name, kind, path, priority in _COLUMNS
        ],
        "schema": {"openAPIV3Schema": schema()},
    }
    names = {
        "kind": KIND,
        "listKind": f"{KIND}List",
        "plural": PLURAL,
        "singular": KIND.lower(),
        "shortNames": list(SHORT_NAMES),
        "categories": ["trainyard", "all"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def schema() -> Schema:
    """The schema of the resource: the document's, with rules, and its status."""
    document = structural_schema()
    properties = {
        "apiVersion": {"type": "string", "description": document["properties"]["apiVersion"]["description"]},
        "kind": {"type": "string", "description": document["properties"]["kind"]["description"]},
        "metadata": {"type": "object"},
        "spec": _checked(document["properties"]["spec"], "spec"),
        "status": _status(),
    }
    return _ruled(
        {
            "type": "object",
            "description": "One training job. The yard runs it; its status is mirrored here.",
            "required": ["spec"],
            "properties": properties,
        },
        cel.OF_PATH[""],
    )


def _checked(node: Schema, path: str) -> Schema:
    """A schema with the rules for it and everything below it."""
    if node.get("properties"):
        node["properties"] = {name: _checked(below, f"{path}.{name}") for name, below in node["properties"].items()}
    if isinstance(node.get("items"), dict):
        node["items"] = _checked(node["items"], f"{path}[]")
    rules = [*cel.OF_PATTERN.get(node.get("pattern", ""), ()), *cel.OF_PATH.get(path, ())]
    if "oneOf" in node:  # says the same, but the API server's words for it name no field
        rules.insert(0, cel.exactly_one([branch["required"][0] for branch in node.pop("oneOf")]))
    if path in cel.MAP_KEYS:
        node |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [cel.MAP_KEYS[path]]}
    return _ruled(node, tuple(rules))


def _ruled(node: Schema, rules: tuple[cel.Rule, ...]) -> Schema:
    return node | ({cel.VALIDATIONS: [rule.schema() for rule in rules]} if rules else {})


def _text(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description, **more}


def _number(description: str, kind: str = "integer") -> Schema:
    return {"type": kind, "description": description}


def _status() -> Schema:
    return {
        "type": "object",
        "description": "What the yard says of the job. Written by the operator, and by the removal of the yard.",
        "properties": {
            "phase": _text("Where the job is.", enum=list(PHASES)),
            "reason": _text("Why, as one word."),
            "message": _text("Why, as a sentence."),
            "jobId": _text("Id of the job in the yard, for `yard logs`, `yard status` and the like."),
            "attempt": _number("Number of the newest attempt; 0 before the first."),
            "retriesUsed": _number("Retries that spent the budget."),
            "submittedAt": _text("When the yard took it.", format="date-time"),
            "startedAt": _text("When it first ran.", format="date-time"),
            "endedAt": _text("When it ended.", format="date-time"),
            "progress": _text("How far it is, for instance `1200/2000 (60%)`."),
            "step": _number("The newest step."),
            "totalSteps": _number("The last step there will be; absent when not known."),
            "timeLeft": _text("How long it may still take, for instance `12m`."),
            "best": _text("Best value of `spec.checkpoints.keep.best.metric`, for instance `val/accuracy=0.97`."),
            "exit": _exit(),
            "eventSeq": _number("Number of the newest event of the job that was mirrored here."),
            "observedGeneration": _number("Generation of the spec that was submitted, or refused."),
            "conditions": _conditions(),
        },
    }


def _exit() -> Schema:
    return {
        "type": "object",
        "description": "How the newest attempt that is over ended.",
        "properties": {
            "reason": _text("Typed reason, as `spec.retries.rules[].reasons` takes it."),
            "message": _text("The same in words."),
            "exitCode": _number("Exit code of the first failing worker."),
            "signal": _text("Signal that ended it."),
            "rank": _number("Its global rank."),
            "lastLines": {
                "type": "array",
                "description": "The last lines of its output.",
                "items": {"type": "string"},
            },
        },
    }


def _conditions() -> Schema:
    properties = {
        "type": _text("Accepted, Running, Finished, Succeeded or Failed."),
        "status": _text("Whether it holds.", enum=["True", "False", "Unknown"]),
        "reason": _text("Why, as one word."),
        "message": _text("Why, as a sentence."),
        "lastTransitionTime": _text("When it began to hold, or not to.", format="date-time"),
        "observedGeneration": _number("Generation of the spec it speaks of."),
    }
    return {
        "type": "array",
        "description": "For `kubectl wait --for=condition=Finished`, and so on.",
        "items": {"type": "object", "required": ["type", "status"], "properties": properties},
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    }
