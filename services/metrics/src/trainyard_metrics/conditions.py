"""Conditions of a filter as SQL, the same on SQLite and PostgreSQL.

Whatever a run may lack is looked up by `id IN (SELECT ...)`, which is true or false and never unknown, so that `not`
means the opposite.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from operator import eq, ge, gt, le, lt, ne
from typing import Any, cast

from sqlalchemy import ColumnElement, and_, not_, or_, select
from sqlmodel import col

from trainyard_metrics.domain import filters
from trainyard_metrics.domain.filters import Among, Compare, Condition, Every, Field, Like, Not, Some, Value
from trainyard_metrics.tables import ParamRow, RunRow, SpecRow, TagRow, ValueRow

Clause = ColumnElement[bool]
Expression = ColumnElement[Any]

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {"=": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}
_ATTRIBUTES: dict[str, Any] = {
    "id": RunRow.id,
    "job": RunRow.job_id,
    "name": RunRow.name,
    "notes": RunRow.notes,
    "workspace": RunRow.workspace,
    "attempt": RunRow.fence,
    "created": RunRow.created_ns,
    "updated": RunRow.updated_ns,
}
FLATTENED: dict[str, Any] = {"params": ParamRow, "spec": SpecRow}
_TOKEN = re.compile(r"\\(.)|(.)", re.DOTALL)


def column(attribute: object) -> Expression:
    """A column of a table."""
    return cast("Expression", col(attribute))


class Dialect:
    """How one kind of database compares texts: by their bytes, wherever it runs.

    Args:
        name: "sqlite" or "postgresql".
    """

    def __init__(self, name: str) -> None:
        self._sqlite = name == "sqlite"

    def text(self, expression: Expression) -> Expression:
        """A text to be compared or ordered."""
        return expression if self._sqlite else expression.collate("C")

    def like(self, expression: Expression, pattern: str) -> Clause:
        """Whether a text matches; capital letters count."""
        if self._sqlite:  # its LIKE takes a and A for the same
            return expression.bool_op("GLOB")(_glob(pattern))
        return expression.like(pattern, escape="\\")

    def where(self, condition: Condition) -> Clause:
        """A condition over `RunRow`."""
        match condition:
            case Every(conditions):
                return and_(*map(self.where, conditions))
            case Some(conditions):
                return or_(*map(self.where, conditions))
            case Not(inner):
                return not_(self.where(inner))
            case Compare(field, operator, value):
                return self._compare(field, operator, value)
            case Among(field, values, negated):
                return self._among(field, values, negated)
            case Like(field, pattern, negated):
                return self._like(field, pattern, negated)

    def _compare(self, field: Field, operator: str, value: Value) -> Clause:
        compare = _OPERATORS[operator]
        match field.group:
            case "metrics":
                return _of_metric(field.name, _compare_number(column(ValueRow.value), operator, value))
            case "params" | "spec" if isinstance(value, float) and not (math.isnan(value) and operator == "="):
                table = FLATTENED[field.group]
                return _of_flattened(field, _compare_number(column(table.number), operator, value))
            case "params" | "spec":
                table = FLATTENED[field.group]
                return _of_flattened(field, compare(self.text(column(table.text)), _param_text(value)))
            case "tags":
                return _of_tag(field.name, compare(self.text(column(TagRow.value)), value))
            case _:
                return self._compare_attribute(field, operator, value)

    def _compare_attribute(self, field: Field, operator: str, value: Value) -> Clause:
        expression: Expression = column(_ATTRIBUTES[field.name])
        compare = _OPERATORS[operator]
        if field.name in filters.TEXTS:
            return cast("Clause", compare(self.text(expression), value))
        if field.name in filters.NUMBERS:
            return _compare_number(expression, operator, value)
        # A run without a point was never updated: no comparison holds.
        return and_(compare(expression, filters.time_ns(field, value)), expression > 0)

    def _among(self, field: Field, values: Sequence[Value], negated: bool) -> Clause:
        if negated:  # has it, and none of the values
            return and_(*(self._compare(field, "!=", value) for value in values))
        return or_(*(self._compare(field, "=", value) for value in values))

    def _like(self, field: Field, pattern: str, negated: bool) -> Clause:
        def matches(expression: Expression) -> Clause:
            found = self.like(expression, pattern)
            return not_(found) if negated else found

        match field.group:
            case "params" | "spec":
                return _of_flattened(field, matches(column(FLATTENED[field.group].text)))
            case "tags":
                return _of_tag(field.name, matches(column(TagRow.value)))
            case _:
                return matches(column(_ATTRIBUTES[field.name]))


def attribute(field: Field) -> Expression:
    """The column of an attribute."""
    return column(_ATTRIBUTES[field.name])


def _of_metric(name: str, clause: Clause) -> Clause:
    return column(RunRow.id).in_(select(column(ValueRow.run_id)).where(column(ValueRow.name) == name, clause))


def _of_flattened(field: Field, clause: Clause) -> Clause:
    table = FLATTENED[field.group]
    return column(RunRow.id).in_(select(column(table.run_id)).where(column(table.key) == field.name, clause))


def _of_tag(key: str, clause: Clause) -> Clause:
    return column(RunRow.id).in_(select(column(TagRow.run_id)).where(column(TagRow.key) == key, clause))


def _compare_number(expression: Expression, operator: str, value: Value) -> Clause:
    if isinstance(value, float) and math.isnan(value):  # stored as NULL
        return expression.is_(None) if operator == "=" else expression.is_not(None)
    clause: Clause = _OPERATORS[operator](expression, value)
    return and_(clause, expression.is_not(None)) if operator == "!=" else clause


def _param_text(value: Value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _glob(pattern: str) -> str:
    """A LIKE pattern as GLOB: special characters of its own become sets of one."""

    def translate(found: re.Match[str]) -> str:
        escaped, plain = found.groups()
        if plain in ("%", "_"):
            return "*" if plain == "%" else "?"
        text: str = escaped if plain is None else plain
        return f"[{text}]" if text in "*?[" else text

    return _TOKEN.sub(translate, pattern)
