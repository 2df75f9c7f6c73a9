"""The JSON Schema of a configuration: what editors complete from, and what messages say is allowed."""

from __future__ import annotations

import re
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from trainkit.config.problems import Path

Schema = dict[str, Any]


class _Strict(GenerateJsonSchema):
    """Closed objects, each field described by its line in the class's docstring."""

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> Schema:
        made = super().dataclass_schema(schema)
        made["additionalProperties"] = False
        text = schema["cls"].__doc__ or ""
        for name, entry in made.get("properties", {}).items():
            if found := re.search(rf"^ +{name}: (.+(?:\n {{12,}}.+)*)", text, re.MULTILINE):
                entry["description"] = " ".join(found[1].split())
        if "description" in made:
            made["description"] = text.partition("\n\n")[0]
        return made


def schema(type_: type) -> Schema:
    """The JSON Schema (2020-12) of a dataclass: unknown keys are errors, names of components complete."""
    made = TypeAdapter(type_).json_schema(schema_generator=_Strict)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def at(root: Schema, path: Path) -> Schema:
    """The part of a schema that a value at `path` has to meet; empty when anything goes."""
    node = _followed(root, root)
    for part in path:
        found: list[Schema] = [below for branch in _branches(node, root) if (below := _below(branch, part)) is not None]
        node = _followed(found[0], root) if len(found) == 1 else {"anyOf": found} if found else {}
    branches = _branches(node, root)
    return branches[0] if len(branches) == 1 else {"anyOf": branches}


def known_keys(node: Schema) -> list[str]:
    """The keys that a mapping may have, over all branches of a union."""
    return list({key: None for branch in node.get("anyOf", [node]) for key in branch.get("properties", {})})


def kinds(node: Schema) -> set[str]:
    """JSON's names for the types that a schema allows; empty when it allows anything."""
    found: set[str] = set()
    for branch in node.get("anyOf", [node]):
        words = branch.get("enum", [branch["const"]] if "const" in branch else [])
        types = branch.get("type", ["boolean" if isinstance(word, bool) else "string" for word in words])
        if not types:
            return set()
        found.update([types] if isinstance(types, str) else types)
    return found


def describe(node: Schema) -> str:
    """What a schema allows, in words."""
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(filter(None, map(describe, node["anyOf"]))))
    if "enum" in node or "const" in node:
        return ", ".join(map(str, node.get("enum", [node.get("const")])))
    if node.get("properties"):
        return f"a mapping with {', '.join(node['properties'])}"
    return _KINDS.get(str(node.get("type", "")), "") + _bounds(node) + _examples(node)


_KINDS = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "null": "null",
    "number": "a number",
    "object": "a mapping",
    "string": "a text",
}


def _bounds(node: Schema) -> str:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    found = [f"{word} {node[key]:g}" for key, word in words.items() if key in node]
    return f" {' and '.join(found)}" if found else ""


def _examples(node: Schema) -> str:
    return f" such as {', '.join(map(repr, node['examples']))}" if "examples" in node else ""


def _followed(node: Schema, root: Schema) -> Schema:
    while "$ref" in node:
        node = root["$defs"][node["$ref"].rpartition("/")[2]]
    return node


def _branches(node: Schema, root: Schema) -> list[Schema]:
    followed = _followed(node, root)
    if "anyOf" not in followed:
        return [followed]
    return [branch for each in followed["anyOf"] for branch in _branches(each, root)]


def _below(node: Schema, part: str | int) -> Schema | None:
    found = node.get("items") if isinstance(part, int) else node.get("properties", {}).get(part)
    if found is None and isinstance(node.get("additionalProperties"), dict):
        found = node["additionalProperties"]
    return found if isinstance(found, dict) else None
