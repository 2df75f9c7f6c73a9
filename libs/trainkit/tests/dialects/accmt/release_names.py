"""Compares the dialect with the names of the release in `names.toml`. Also a script: it imports `accmt`."""

from __future__ import annotations

import importlib
import inspect
import tomllib
from importlib.resources import files
from typing import Any

TABLE = tomllib.loads(files("trainkit.dialects.accmt").joinpath("names.toml").read_text("utf-8"))
MORE = {
    # Parameters with defaults that the dialect adds behind those of the release.
    "accmt.metrics:MetricParallel": ["cast=torch.float32"],
    "accmt.states:TrainingState": ["best_valid_loss=inf", "model_savings=<factory>", "val_key=''"],
}
OPTIONAL = {
    # `@on_process(1)` works too.
    "accmt.decorators:on_local_process": ["function", "local_process_index=None"],
    "accmt.decorators:on_process": ["function", "process_index=None"],
}


def mismatches(root: str) -> list[str]:
    """What differs when `accmt` is imported as `root`."""
    found = [_of_alias(root, *row) for row in TABLE["same_as"].items()]
    found += [_of_parameters(root, *row) for row in TABLE["parameters"].items()]
    found += [_of_members(root, *row) for row in TABLE["members"].items()]
    found += [_of_kind(root, *row) for row in TABLE["kind"].items()]
    return [each for each in found if each]


def resolved(root: str, path: str) -> Any:
    """The object of `MODULE:NAME`."""
    module, _, name = path.partition(":")
    value: Any = importlib.import_module(root + module.removeprefix("accmt"))
    for part in name.split("."):
        value = inspect.getattr_static(value, part) if isinstance(value, type) else getattr(value, part)
    return value.__func__ if isinstance(value, classmethod) else value


def _of_alias(root: str, path: str, other: str) -> str:
    return "" if resolved(root, path) is resolved(root, other) else f"{path} is not {other}"


def _of_parameters(root: str, path: str, wanted: list[str]) -> str:
    value = resolved(root, path)
    parameters = list(inspect.signature(value).parameters.values())
    if "." in path.partition(":")[2]:
        parameters = parameters[1:]
    found = list(_written(parameters))
    wanted = OPTIONAL.get(path, wanted + MORE.get(path, []))
    return "" if found == wanted else f"{path}{found}, not {wanted}"


def _written(parameters: list[inspect.Parameter]) -> Any:
    starred = False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        starred = starred or each.kind is each.VAR_POSITIONAL
        prefix = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        yield prefix + each.name + ("" if each.default is each.empty else f"={each.default!r}")


def _of_members(root: str, path: str, wanted: list[str]) -> str:
    missing = set(wanted) - set(dir(resolved(root, path)))
    return f"{path} lacks {missing}" if missing else ""


def _of_kind(root: str, path: str, kind: str) -> str:
    value = resolved(root, path)
    return "" if isinstance(value, property) == (kind == "property") else f"{path} is no {kind}"


if __name__ == "__main__":
    import accmt  # noqa: F401  what a project writes

    assert not mismatches("accmt"), mismatches("accmt")
    print("the same names")
