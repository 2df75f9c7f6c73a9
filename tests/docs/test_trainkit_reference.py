"""The reference of trainkit has every public name, and says something of each."""

import re
from importlib import import_module

import pytest

from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "reference" / "trainkit.md").read_text()
CONSTANTS = {"HOOKS", "DurationText", "Space"}  # neither a class nor a function
PACKAGES = ["callbacks", "config", "data", "metrics", "optim", "search", "strategies", "trackers"]


@pytest.mark.parametrize("package", ["trainkit", *(f"trainkit.{name}" for name in PACKAGES)])
def test_every_public_name_of_the_package_is_there(package):
    names = set(re.findall(r"^### `(\w+)`$", PAGE, re.MULTILINE))

    assert set(import_module(package).__all__) - names - CONSTANTS == set()


def test_every_entry_says_what_it_is():
    entries = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
    said = {entry.splitlines()[0]: entry.split("```\n", 1)[1].strip() for entry in entries}

    assert len(said) > 80
    assert [name for name, text in said.items() if not re.match(r"[A-Z`a-z]", text)] == []
