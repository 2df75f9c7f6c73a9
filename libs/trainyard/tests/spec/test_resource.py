"""The custom resource says of a document what the models say, and its rules lie on fields that exist."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from trainyard.spec import cel
from trainyard.spec.resource import definition, schema
from trainyard.spec.schema import structural_schema

from scripts.testbed.patience import PATIENCE_S

ROOT = Path(__file__).parents[4]


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema, with its path."""
    yield path, node
    for name, below in node.get("properties", {}).items():
        yield from nodes(below, f"{path}.{name}".lstrip("."))
    if isinstance(node.get("items"), dict):
        yield from nodes(node["items"], f"{path}[]")


FOUND = dict(nodes(schema()))


@pytest.mark.parametrize("path", [*cel.OF_PATH, *cel.MAP_KEYS])
def test_a_rule_lies_on_a_field_that_exists(path: str) -> None:
    assert path in FOUND


@pytest.mark.parametrize("pattern", cel.OF_PATTERN)
def test_a_rule_of_a_pattern_is_on_every_field_that_has_it(pattern: str) -> None:
    fields = [node for node in FOUND.values() if node.get("pattern") == pattern]
    assert fields
    assert all(cel.VALIDATIONS in node for node in fields)


def test_a_rule_points_to_a_field_below_its_own() -> None:
    for path, rules in cel.OF_PATH.items():
        for rule in rules:
            assert not rule.field or f"{path}.{rule.field}".lstrip(".") in FOUND


def test_exactly_one_of_several_is_a_rule_and_no_branch() -> None:
    assert not [path for path, node in FOUND.items() if "oneOf" in node]
    branches = [path for path, node in nodes(structural_schema()) if "oneOf" in node]
    assert branches == ["spec.code", "spec.secrets[].from", "spec.kubernetes.volumes[]"]
    for path in branches:
        assert "exactly one of" in FOUND[path][cel.VALIDATIONS][0]["message"]


def test_every_field_of_a_document_is_in_the_resource_with_its_default() -> None:
    for path, node in nodes(structural_schema()["properties"]["spec"], "spec"):
        assert FOUND[path].get("default") == node.get("default"), path


def test_the_columns_show_fields_of_the_status() -> None:
    for column in definition()["spec"]["versions"][0]["additionalPrinterColumns"]:
        assert column["jsonPath"].lstrip(".") in FOUND or column["jsonPath"].startswith(".metadata.")


def test_what_is_checked_in_is_what_the_models_say() -> None:
    done = subprocess.run([ROOT / "scripts/crds", "--check"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    text = (ROOT / "charts/trainyard/crds/trainingjobs.yaml").read_text()
    assert YAML(typ="safe").load(text) == definition()
