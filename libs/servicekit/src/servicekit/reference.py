"""The reference of a service's settings, made from their models."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


def settings_table(model: type[BaseModel], prefix: str) -> str:
    """A Markdown table: environment variable, default, bounds, and what the text below the field says.

    Args:
        prefix: of the variables, for instance "TRAINYARD_METRICS".
    """
    texts = _texts(model)
    rows = [
        f"| `{prefix}_{name.upper()}` | {_default(field)} | {_bounds(field)} | {texts.get(name, '')} |"
        for name, field in model.model_fields.items()
    ]
    return "\n".join(["| variable | default | allowed | meaning |", "|---|---|---|---|", *rows]) + "\n"


def options_table(model: type[BaseModel], prefix: str) -> str:
    """A Markdown table of the flags of a service that runs alone."""
    rows = [
        f"| `--{name.replace('_', '-')}` | `{prefix}_{name.upper()}` | {_default(field)} | {_cell(field.description)} |"
        for name, field in model.model_fields.items()
    ]
    return "\n".join(["| flag | variable | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _texts(model: type[BaseModel]) -> dict[str, str]:
    """What stands directly below each field in the sources, also of those that the model inherits."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= _own_texts(base)
    return found


def _own_texts(model: type[BaseModel]) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in itertools.pairwise(definition.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = _cell(text)
    return found


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    if field.default_factory is not None:
        return "of the machine"
    value: Any = field.default
    if value is None or value is PydanticUndefined or value == "" or value == {} or isinstance(value, SecretStr):
        return "none"
    return f"`{value}`"


def _bounds(field: FieldInfo) -> str:
    names = {"Gt": "more than", "Ge": "at least", "Lt": "less than", "Le": "at most"}
    bounds = [f"{names[type(each).__name__]} {_bound(each)}" for each in field.metadata if type(each).__name__ in names]
    if not bounds and field.annotation is bool:
        return "`true`, `false`"
    return ", ".join(bounds)


def _bound(constraint: Any) -> Any:
    return next(value for name in ("gt", "ge", "lt", "le") if (value := getattr(constraint, name, None)) is not None)


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")
