"""The order of found runs, and where the next page begins: `metrics.loss desc, created`.

Runs that lack what they are ordered by come last, whichever the direction; runs that are equal come newest first. A
page token holds the keys of the last run that was sent: pages neither repeat nor miss runs that stay as they are.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from servicekit.errors import InvalidArgument
from sqlalchemy import ColumnElement, Select, and_, false, or_
from sqlalchemy.orm import aliased

from trainyard_metrics.conditions import FLATTENED, Clause, Dialect, Expression, attribute, column
from trainyard_metrics.domain import filters
from trainyard_metrics.domain.filters import Field
from trainyard_metrics.domain.params import storable
from trainyard_metrics.tables import RunRow, TagRow, ValueRow

_MAX_FIELDS = 4
_DIRECTION = re.compile(r"\s+(asc|desc)\s*$", re.IGNORECASE)
_PARTS = re.compile(r"""((?:[^,"']|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')+)(?:,|$)""")


@dataclass(frozen=True, slots=True)
class _Part:
    field: Field
    descending: bool


@dataclass(frozen=True, slots=True)
class Key:
    """One thing to order by."""

    expression: Expression
    descending: bool

    def clause(self) -> ColumnElement[Any]:
        """What follows ORDER BY."""
        return (self.expression.desc() if self.descending else self.expression.asc()).nulls_last()

    def same(self, value: object) -> Clause:
        """Runs that have this value too."""
        return self.expression.is_(None) if value is None else self.expression == value

    def after(self, value: object) -> Clause:
        """Runs that come behind this value."""
        if value is None:
            return false()
        beyond = self.expression < value if self.descending else self.expression > value
        return or_(beyond, self.expression.is_(None))


class Order:
    """How found runs are ordered.

    Args:
        text: of the request.

    Raises:
        InvalidArgument: BadOrder, BadFilter.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._parts = _parse(text)

    def apply(self, query: Select[Any], dialect: Dialect) -> tuple[Select[Any], list[Key]]:
        """The query with what the order needs joined to it, and its keys; the last are the run's age and id."""
        keys: list[Key] = []
        for part in self._parts:
            query, expressions = _join(query, part.field, dialect)
            keys += [Key(expression, part.descending) for expression in expressions]
        newest = Key(column(RunRow.created_ns), True)  # ids of plain scripts' runs do not grow with time
        return query, [*keys, newest, Key(dialect.text(column(RunRow.id)), True)]

    def token(self, values: Sequence[object]) -> str:
        """The token of the page behind a run with these keys."""
        return base64.urlsafe_b64encode(json.dumps([self._text, *values]).encode()).decode()

    def behind(self, token: str, keys: Sequence[Key]) -> Clause:
        """The runs behind a token.

        Raises:
            InvalidArgument: BadPageToken.
        """
        text, values = _read(token)
        if text != self._text or len(values) != len(keys) or not all(map(_is_key, values)):
            raise InvalidArgument(
                "this page token is not of this search",
                reason="BadPageToken",
                hint="ask for further pages with the filter and order of the first one",
            )
        same = [key.same(value) for key, value in zip(keys, values, strict=True)]
        return or_(
            *(and_(*same[:index], key.after(values[index])) for index, key in enumerate(keys)),
        )


def _read(token: str) -> tuple[object, list[object]]:
    """What is in a token, whoever wrote it: a text and values, or nothing."""
    try:
        text, *values = json.loads(base64.urlsafe_b64decode(token.encode()))
    except (ValueError, TypeError, RecursionError):
        return None, []
    return text, values


def _is_key(value: object) -> bool:
    if isinstance(value, str):
        return storable(value) == value
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _parse(text: str) -> list[_Part]:
    if not text.strip():
        return []
    pieces = [found[1] for found in _PARTS.finditer(text)]
    if len(pieces) > _MAX_FIELDS or sum(map(len, pieces)) + len(pieces) - 1 != len(text):
        raise InvalidArgument(
            f"the order {text[:200]!r}",
            reason="BadOrder",
            hint=f'name at most {_MAX_FIELDS} fields, for instance metrics["val/accuracy"] desc, created',
        )
    return [_part(piece) for piece in pieces]


def _part(piece: str) -> _Part:
    direction = _DIRECTION.search(piece)
    try:
        field = filters.parse_field(piece[: direction.start()] if direction else piece)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"order by '{piece.strip()}': {error.message.removeprefix('filter, ')}",
            reason="BadOrder",
            hint=f"a field, then nothing, asc or desc; {error.hint}",
        ) from None
    return _Part(field, direction is not None and direction[1].lower() == "desc")


def _join(query: Select[Any], field: Field, dialect: Dialect) -> tuple[Select[Any], list[Expression]]:
    run_id = column(RunRow.id)
    match field.group:
        case "metrics":
            value = aliased(ValueRow)
            query = query.outerjoin(value, and_(column(value.name) == field.name, column(value.run_id) == run_id))
            return query, [column(value.value)]
        case "params" | "spec":  # numbers before texts
            param = aliased(FLATTENED[field.group])
            query = query.outerjoin(param, and_(column(param.key) == field.name, column(param.run_id) == run_id))
            return query, [column(param.number), dialect.text(column(param.text))]
        case "tags":
            tag = aliased(TagRow)
            query = query.outerjoin(tag, and_(column(tag.key) == field.name, column(tag.run_id) == run_id))
            return query, [dialect.text(column(tag.value))]
        case _:
            expression = attribute(field)
            return query, [dialect.text(expression) if field.name in filters.TEXTS else expression]
