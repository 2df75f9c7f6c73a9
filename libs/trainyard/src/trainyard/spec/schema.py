"""The JSON Schema of a document, from the models.

`structural_schema` keeps to what a Kubernetes custom resource may use: everything inlined, no union with null, no
keyword that its API server does not know. `json_schema` is the same for editors, with unknown keys refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

from trainyard.spec.model import API_VERSION, KIND, TrainingJob

Schema = dict[str, Any]

_NULL = {"type": "null"}


def json_schema() -> Schema:
    """The schema for editors (draft 2020-12). A fresh copy."""
    schema = copy.deepcopy(closed_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"{KIND} {API_VERSION}", **schema}


def structural_schema() -> Schema:
    """The schema for a custom resource: structural, in the sense of Kubernetes. A fresh copy."""
    return _map(copy.deepcopy(closed_schema()), _open)


@cache
def closed_schema() -> Schema:
    """The schema that `json_schema` copies; not to be changed."""
    raw = TrainingJob.model_json_schema(by_alias=True)
    definitions = raw.pop("$defs", {})
    schema = _map(raw, lambda node: _plain(node, definitions))
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


def _map(node: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """A schema with `change` applied to it, then to every schema inside it."""
    node = change(node)
    for word in ("items", "additionalProperties"):
        if isinstance(node.get(word), dict):
            node[word] = _map(node[word], change)
    for word in ("anyOf", "oneOf"):
        if word in node:
            node[word] = [_map(member, change) for member in node[word]]
    if "properties" in node:
        node["properties"] = {name: _map(below, change) for name, below in node["properties"].items()}
    return node


def _plain(node: Schema, definitions: Schema) -> Schema:
    """Definitions are put where they are used; `T or null` becomes `T`, a constant an enumeration of one."""
    node = {key: value for key, value in node.items() if key != "title"}
    if "$ref" in node:
        name = node.pop("$ref").rpartition("/")[2]
        return _plain({**definitions[name], **node}, definitions)
    if _NULL in node.get("anyOf", ()):
        (only,) = [member for member in node.pop("anyOf") if member != _NULL]
        del node["default"]
        return _plain({**only, **node}, definitions)
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if "default" in node:
        node["default"] = _present(node["default"])
    return node


def _present(default: Any) -> Any:
    """A default without its absent fields."""
    if not isinstance(default, dict):
        return default
    return {key: _present(value) for key, value in default.items() if value is not None}


def _open(node: Schema) -> Schema:
    """Without what only editors read: a custom resource refuses unknown keys by itself."""
    node = {key: value for key, value in node.items() if key != "examples"}
    if node.get("additionalProperties") is False:
        del node["additionalProperties"]
    return node
