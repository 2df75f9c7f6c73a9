"""The schema is structural in the sense of Kubernetes, so that the same models can become a custom resource."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel
from trainyard.spec import TrainingJob
from trainyard.spec.reference import page
from trainyard.spec.schema import at, json_schema, structural_schema

from scripts.testbed.patience import PATIENCE_S

ROOT = Path(__file__).parents[4]

# The keywords of JSONSchemaProps that a structural schema may use; `anyOf` and `oneOf` only as checked below.
ALLOWED = {
    "type", "properties", "items", "additionalProperties", "required", "enum", "default", "description", "pattern",
    "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties", "anyOf", "oneOf",
    "x-kubernetes-int-or-string",
}  # fmt: skip
INT_OR_STRING = [{"type": "integer"}, {"type": "string"}]


def violations(node: dict[str, Any], path: str = "") -> Iterator[str]:
    """Why a schema is not structural."""
    if unknown := set(node) - ALLOWED:
        yield f"{path}: {sorted(unknown)} is not known to the API server"
    if node.get("x-kubernetes-int-or-string"):
        if node.get("anyOf") != INT_OR_STRING or "type" in node:
            yield f"{path}: int-or-string has no type and this anyOf"
    elif not isinstance(node.get("type"), str):
        yield f"{path}: has no type of its own"
    elif "anyOf" in node:
        yield f"{path}: is a union"
    if any(set(member) != {"required"} for member in node.get("oneOf", ())):
        yield f"{path}: a branch of oneOf says more than what is required"
    if "properties" in node and "additionalProperties" in node:
        yield f"{path}: has properties and additionalProperties"
    if node.get("type") == "array" and "items" not in node:
        yield f"{path}: has no items"
    if "default" in node and None in (node["default"], *_values(node["default"])):
        yield f"{path}: has a null in its default"
    for name, below in node.get("properties", {}).items():
        yield from violations(below, f"{path}.{name}")
    for word in ("items", "additionalProperties"):
        if isinstance(node.get(word), dict):
            yield from violations(node[word], f"{path}.{word}")


def _values(default: Any) -> list[Any]:
    return list(default.values()) if isinstance(default, dict) else []


def test_the_schema_is_structural() -> None:
    assert list(violations(structural_schema())) == []


@pytest.mark.parametrize(
    "broken",
    [
        {"$ref": "#/$defs/X"},
        {"type": "object", "$defs": {}},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"anyOf": [{"type": "integer"}, {"type": "object"}], "x-kubernetes-int-or-string": True},
        {"type": ["string", "null"]},
        {"type": "string", "const": "x"},
        {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}},
        {"type": "object", "propertyNames": {"pattern": "x"}},
        {"type": "object", "oneOf": [{"required": ["a"], "type": "object"}]},
        {"type": "array"},
        {"type": "object", "properties": {"a": {"type": "integer", "exclusiveMinimum": 0}}},
        {"type": "object", "default": {"a": None}},
    ],
)
def test_a_schema_that_is_not_structural_is_found(broken: dict[str, Any]) -> None:
    assert list(violations(broken))


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for other in model.__subclasses__():
        yield from models(other)


def test_every_model_refuses_unknown_keys_and_changes() -> None:
    for model in models(TrainingJob.__mro__[1]):
        assert (model.model_config["extra"], model.model_config["frozen"], model.model_config["strict"]) == (
            "forbid", True, True,
        )  # fmt: skip


def test_every_field_says_what_it_means() -> None:
    def silent(node: dict[str, Any], path: str) -> Iterator[str]:
        for name, below in node.get("properties", {}).items():
            if not below.get("description"):
                yield f"{path}.{name}"
            yield from silent(below, f"{path}.{name}")
            yield from silent(below.get("items", {}), f"{path}.{name}[]")

    assert list(silent(json_schema(), "")) == []


def test_the_editors_schema_is_valid_and_refuses_unknown_keys() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    document = {"apiVersion": "trainyard.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}, "spec": {}}
    errors = {error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document)}
    assert errors == {"'command' is a required property"}
    document["spec"] = {"command": ["a"], "nodez": 1}
    assert not jsonschema.Draft202012Validator(schema).is_valid(document)


def test_examples_of_fields_fit_their_schema() -> None:
    def wrong(node: dict[str, Any], path: str) -> Iterator[str]:
        if not all(jsonschema.Draft202012Validator(node).is_valid(example) for example in node.get("examples", ())):
            yield path
        for name, below in node.get("properties", {}).items():
            yield from wrong(below, f"{path}.{name}")
        if isinstance(node.get("items"), dict):
            yield from wrong(node["items"], f"{path}[]")

    assert list(wrong(json_schema(), "")) == []


def test_the_schema_is_found_along_a_path() -> None:
    assert (at(("spec", "retries", "rules", 0, "exitCodes", 3)) or {})["maximum"] == 255
    assert (at(("spec", "env", "ANY")) or {})["type"] == "string"
    assert at(("spec", "nothing")) is None


def test_the_schemas_handed_out_are_copies() -> None:
    json_schema()["properties"].clear()
    assert json_schema()["properties"]


def test_the_reference_page_has_every_field() -> None:
    text = page()
    for field in ("`workersPerNode`", "`hangTimeout`", "## `spec.retries.rules[]`", "## `spec.secrets[].from`"):
        assert field in text


def test_the_generated_pages_are_up_to_date() -> None:
    done = subprocess.run([ROOT / "scripts/docs", "--check"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
