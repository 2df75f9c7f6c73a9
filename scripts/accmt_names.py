"""Writes the names of a release of accmt that its dialect provides, from the release's wheel.

    python -m scripts.accmt_names 1.9.0.whl 1.9.2.whl

The first wheel is the release that the dialect follows. From the second come the names that scripts of the first
release's time import as well (`LATER`). Wheels are read, never installed or imported; the file keeps names, parameters
and defaults alone. Names that the dialect replaces (`replaced.toml`) and the trainer's own (`INTERNAL`) are left out.
"""

from __future__ import annotations

import ast
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "libs/trainkit/src/trainkit/dialects/accmt"
LATER = {"accmt:Evaluator", "accmt.evaluator:Evaluator", "accmt.modules:AcceleratorModule.test_step"}
INTERNAL = {
    "accmt.hp_search.HyperParameterSearch": {"objective_fn"},
    "accmt.metrics.Metric": {"add_batch", "clear"},
    "accmt.monitor.Monitor": {
        "log",
        "log_additional_metrics",
        "log_checkpoint",
        "log_cpu_utilization",
        "log_epoch",
        "log_gpu_utilization",
        "log_grad_norm",
        "log_learning_rate",
        "log_train_loss",
        "log_train_loss_and_grad_norm",
        "log_validation_loss",
        "log_values",
    },
    "accmt.trainer.Trainer": {"batch_iterator", "dispatch_async_eval", "epoch_iterator", "eval", "launch_eval", "loop"},
    "accmt.collate_fns.DataCollatorForLanguageModeling": {"torch_mask_tokens"},
}
"""Methods that the library calls itself, without documentation."""

KEYS = {
    "same_as": "names that a module has from another",
    "parameters": "of functions, classes and methods, as inspect.signature writes them",
    "members": "of classes that list names",
    "kind": "constants and properties",
    "since": "names of a later release that scripts import too",
}
Row = dict[str, Any]


def main(arguments: list[str]) -> None:
    followed, later = (Path(argument) for argument in arguments)
    replaced = tomllib.loads((FOLDER / "replaced.toml").read_text("utf-8"))
    rows = [row for row in _rows(followed) if _kept(row, replaced)]
    rows += [{**row, "since": _version(later)} for row in _rows(later) if _path(row) in LATER or _within_later(row)]
    lines = ["# Written by scripts/accmt_names.py: public names of a release as MODULE:NAME."]
    lines.append(f'release = "{_version(followed)}"')
    for key, comment in KEYS.items():
        lines += ["", f"[{key}]  # {comment}"]
        lines += [f"{_toml(_path(row))} = {_toml(row[key])}" for row in rows if key in row]
    (FOLDER / "names.toml").write_text("\n".join(lines) + "\n", "utf-8")
    print(f"{len(rows)} names of {_version(followed)}")


def _version(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def _path(row: Row) -> str:
    return f"{row['module']}:{row['name']}"


def _within_later(row: Row) -> bool:
    return row["module"] == "accmt.evaluator" and row["name"].startswith("Evaluator.")


def _kept(row: Row, replaced: dict[str, Any]) -> bool:
    owner, _, method = row["name"].partition(".")
    internal = INTERNAL.get(f"{row['module']}.{owner}", set())
    return row["module"] not in replaced["modules"] and owner not in replaced["names"] and method not in internal


def _rows(wheel: Path) -> Iterator[Row]:
    with zipfile.ZipFile(wheel) as opened:
        for file in sorted(opened.namelist()):
            if file.startswith("accmt/") and file.endswith(".py"):
                module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                for statement in ast.parse(opened.read(file)).body:
                    yield from _statement(module, statement, exports=module == "accmt")


def _statement(module: str, statement: ast.stmt, *, exports: bool) -> Iterator[Row]:
    if isinstance(statement, ast.ImportFrom) and statement.level and exports:
        for alias in statement.names:
            if not alias.name.startswith("_"):
                yield {"module": module, "name": alias.name, "same_as": f"accmt.{statement.module}:{alias.name}"}
    elif isinstance(statement, ast.FunctionDef) and not statement.name.startswith("_"):
        yield {"module": module, "name": statement.name, "parameters": _parameters(statement.args)}
    elif isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
        yield from _class(module, statement)
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        if isinstance(target, ast.Name) and not target.id.startswith("_"):
            yield {"module": module, "name": target.id, "kind": "constant"}


def _class(module: str, statement: ast.ClassDef) -> Iterator[Row]:
    methods = {each.name: each for each in statement.body if isinstance(each, ast.FunctionDef)}
    plain = [each for each in statement.body if isinstance(each, ast.Assign)]
    members = [t.id for each in plain for t in each.targets if isinstance(t, ast.Name) and t.id[0].isupper()]
    row: Row = {"module": module, "name": statement.name}
    if members:
        yield {**row, "members": members}
    elif "__init__" in methods:
        yield {**row, "parameters": _parameters(methods["__init__"].args)[1:]}
    elif fields := [each for each in statement.body if isinstance(each, ast.AnnAssign)]:
        is_dataclass = any("dataclass" in ast.unparse(each) for each in statement.decorator_list)
        yield {**row, "parameters": [_field(each) for each in fields] if is_dataclass else []}
    else:
        yield {**row, "parameters": []}
    for name, method in methods.items():
        decorators = {ast.unparse(each) for each in method.decorator_list}
        if name.startswith("_") and name != "__call__":
            continue
        found: Row = {"module": module, "name": f"{statement.name}.{name}"}
        yield (
            {**found, "kind": "property"}
            if "property" in decorators
            else {**found, "parameters": _parameters(method.args)[1:]}
        )


def _parameters(arguments: ast.arguments) -> list[str]:
    plain = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
    found = [_parameter(*each) for each in zip(plain, [*missing, *arguments.defaults], strict=True)]
    if arguments.vararg or arguments.kwonlyargs:
        found.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    found += [_parameter(*each) for each in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return found + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={_value(default)}"


def _field(statement: ast.AnnAssign) -> str:
    name, value = ast.unparse(statement.target), statement.value
    if isinstance(value, ast.Call):
        [keyword] = value.keywords
        return f"{name}={'<factory>' if keyword.arg == 'default_factory' else _value(keyword.value)}"
    return name if value is None else f"{name}={_value(value)}"


def _value(expression: ast.expr) -> str:
    """A default as `repr` writes it."""
    text = ast.unparse(expression)
    if text == "float('inf')":
        return "inf"
    return repr(ast.literal_eval(expression)) if not isinstance(expression, ast.Attribute) else text


def _toml(value: str | list[str]) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


if __name__ == "__main__":
    main(sys.argv[1:])
