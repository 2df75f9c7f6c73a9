"""The JSON Schema of a document, from the models.

`structural_schema` keeps to what a Kubernetes custom resource may use: everything inlined, no union with null, no keyword
that its API server does not know. `json_schema` is the same for editors, with unknown keys refused.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from trainyard.spec.model import API_VERSION, KIND, TrainingJob

Schema = dict[str, Any]


def json_schema() -> Schema:
    """The schema for editors (draft 2020-12). A fresh copy."""
    schema = copy.deepcopy(closed_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"{KIND} {API_VERSION}", **schema}


def structural_schema() -> Schema:
    """The schema for a custom resource: structural, in the sense of Kubernetes. A fresh copy."""
    opened: Schema = _map(copy.deepcopy(closed_schema()), _open)
    return opened


@cache
def closed_schema() -> Schema:
    """The schema that `json_schema` copies; not to be changed."""
    raw = TrainingJob.model_json_schema(by_alias=True)
    definitions = raw.pop("$defs", {})
    schema: Schema = _inline(raw, definitions)
    schema["required"] = ["apiVersion", "kind", *schema["required"]]
    return schema


def at(path: tuple[str | int, ...]) -> Schema | None:
    """The schema of the value at a path, or None when no such value is known."""
    node: Schema = closed_schema()
    for part in path:
        if isinstance(part, int):
            below = node.get("items")
        else:
            below = node.get("properties", {}).get(part, node.get("additionalProperties"))
        if not isinstance(below, dict):
            return None
        node = below
    return node


def _inline(node: Any, definitions: Schema) -> Any:
    """Definitions are put where they are used; `T or null` becomes `T`, a constant an enumeration of one."""
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    union = node.get("anyOf", ())
    if {"type": "null"} in union:
        (only,) = [member for member in union if member != {"type": "null"}]
        rest = {key: value for key, value in node.items() if key not in ("anyOf", "default")}
        return _inline({**only, **rest}, definitions)
    if "const" in node:
        node = {**{key: value for key, value in node.items() if key != "const"}, "enum": [node["const"]]}
    return {
        key: {name: _inline(value, definitions) for name, value in below.items()}
        if key == "properties"
        else _inline(below, definitions)
        for key, below in node.items()
        if not (key == "title" and isinstance(below, str))
    }


def _open(node: Schema) -> Schema:
    kept = {key: value for key, value in node.items() if key not in ("examples", "title")}
    if kept.get("additionalProperties") is False:
        del kept["additionalProperties"]
    return kept


def _map(node: Any, change: Any) -> Any:
    if isinstance(node, list):
        return [_map(item, change) for item in node]
    if not isinstance(node, dict):
        return node
    node = change(node)
    return {
        key: {name: _map(value, change) for name, value in below.items()}
        if key == "properties"
        else _map(below, change)
        for key, below in node.items()
    }
