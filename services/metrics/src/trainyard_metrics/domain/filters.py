"""The language in which runs are searched: text to conditions, with errors that teach.

    metrics["val/accuracy"] > 0.9 and params.lr <= 0.1 and tags.team = "vision" and not name like "test%"

A comparison with something that a run does not have is false, and so is one with NaN; `= nan` asks for NaN itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, cast

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedInput, UnexpectedToken, VisitError
from servicekit.errors import InvalidArgument

MAX_LENGTH = 4096
_MAX_DEPTH = 50
_MAX_CONDITIONS = 256  # databases bound how large an expression is; every value of a list is one

GROUPS = ("metrics", "params", "spec", "tags")
TEXTS = ("id", "job", "name", "notes", "workspace")
NUMBERS = ("attempt",)
TIMES = ("created", "updated")
ATTRIBUTES = (*TEXTS, *NUMBERS, *TIMES)

Value = float | str | bool
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_WORD = re.compile(r"[\w.]+")

_TERMINALS = {
    "OPERATOR": ("=", "!=", "<", "<=", ">", ">="),
    "NAME": (*(f"{group}.<name>" for group in GROUPS), *ATTRIBUTES),
    "KEY": ("a name",),
    "STRING": ('"text"',),
    "NUMBER": ("a number",),
    "SPECIAL": ("nan", "inf"),
    "BOOLEAN": ("true", "false"),
    "_OR": ("or",),
    "_AND": ("and",),
    "NOT": ("not",),
    "_IN": ("in",),
    "_LIKE": ("like",),
    "DOT": (".",),
    "LSQB": ("[",),
    "RSQB": ("]",),
    "LPAR": ("(",),
    "RPAR": (")",),
    "COMMA": (",",),
    "$END": ("the end",),
}


@dataclass(frozen=True, slots=True)
class Field:
    """What is compared: a member of a group, or (group "") an attribute of the run.

    Attributes:
        column: where it is in the text, from 1.
    """

    group: str
    name: str
    column: int = 0


@dataclass(frozen=True, slots=True)
class Compare:
    """`operator` is one of = != < <= > >=."""

    field: Field
    operator: str
    value: Value


@dataclass(frozen=True, slots=True)
class Among:
    """The field has one of the values, or (`negated`) another one."""

    field: Field
    values: tuple[Value, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Like:
    """The field's text matches a pattern, in which % is any text and _ any character; or (`negated`) it does not."""

    field: Field
    pattern: str
    negated: bool


@dataclass(frozen=True, slots=True)
class Every:
    """All conditions hold."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Some:
    """At least one condition holds."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The condition does not hold."""

    condition: Condition


Condition = Compare | Among | Like | Every | Some | Not


def parse(text: str) -> Condition | None:
    """The condition that a filter states; None for an empty one.

    Raises:
        InvalidArgument: BadFilter; says where, what is allowed there, and what was perhaps meant.
    """
    if len(text) > MAX_LENGTH:
        raise _bad(f"a filter of {len(text):,} characters", f"use at most {MAX_LENGTH:,}")
    try:
        found = cast("Condition | None", _parser().parse(text))
    except VisitError as error:
        raise error.orig_exc from None
    except UnexpectedInput as error:
        raise _explain(text, error) from None
    if found is not None:
        _check_size(found)
    return found


def parse_field(text: str) -> Field:
    """A field alone, as in an order.

    Raises:
        InvalidArgument: BadFilter.
    """
    try:
        return cast("Field", _parser("field").parse(text))
    except VisitError as error:
        raise error.orig_exc from None
    except UnexpectedInput as error:
        raise _explain(text, error) from None


def time_ns(field: Field, value: Value) -> int:
    """A time in ISO 8601, in UTC unless it says otherwise, as nanoseconds.

    Raises:
        InvalidArgument: BadFilter.
    """
    try:
        if not isinstance(value, str):
            raise ValueError
        moment = datetime.fromisoformat(value)
        seconds = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    except (ValueError, OverflowError):
        raise _bad(
            f"column {field.column}: {field.name} compared with {_shown(value)}",
            'compare it with a date or a time, for instance "2026-11-20" or "2026-11-20T10:30:00"',
        ) from None
    return int(seconds * 1_000_000) * 1000


def _check_size(root: Condition) -> None:
    level: list[Condition] = [root]
    conditions = depth = 0
    while level:
        depth += 1
        conditions += sum(map(_comparisons, level))
        level = [child for node in level for child in _children(node)]
    if depth > _MAX_DEPTH or conditions > _MAX_CONDITIONS:
        raise _bad(
            f"a filter of {conditions} conditions, {depth} levels deep",
            f"use at most {_MAX_CONDITIONS} conditions, each value of a list being one, and {_MAX_DEPTH} levels",
        )


def _comparisons(node: Condition) -> int:
    if isinstance(node, Among):
        return len(node.values)
    return int(isinstance(node, Compare | Like))


def _children(node: Condition) -> tuple[Condition, ...]:
    if isinstance(node, Every | Some):
        return node.conditions
    return (node.condition,) if isinstance(node, Not) else ()


@v_args(inline=True)
class _Conditions(Transformer[Token, Any]):
    """Builds conditions while the parser goes, so that deep filters need no deep stack."""

    def start(self, condition: Condition | None) -> Condition | None:
        return condition

    def any_of(self, *conditions: Condition) -> Condition:
        return conditions[0] if len(conditions) == 1 else Some(conditions)

    def all_of(self, *conditions: Condition) -> Condition:
        return conditions[0] if len(conditions) == 1 else Every(conditions)

    def negated(self, *parts: Any) -> Condition:
        condition: Condition = parts[-1]
        return Not(condition) if len(parts) % 2 == 0 else condition

    def compare(self, field: Field, operator: Token, value: Value) -> Condition:
        operator_text = "=" if operator == "==" else str(operator)
        _check_value(field, value)
        if (value != value or isinstance(value, bool)) and operator_text not in ("=", "!="):
            raise _bad(f"column {field.column}: {field.name} {operator_text} {_shown(value)}", "use = or !=")
        return Compare(field, operator_text, value)

    def among(self, field: Field, negated: Token | None, *values: Value) -> Condition:
        for value in values:
            _check_value(field, value)
        return Among(field, values, negated is not None)

    def like(self, field: Field, negated: Token | None, pattern: Token) -> Condition:
        if field.group == "metrics" or (not field.group and field.name in (*NUMBERS, *TIMES)):
            raise _bad(f"column {field.column}: {field.name} is not text", "use =, !=, <, <=, > or >=")
        return Like(field, _keep_escapes(pattern), negated is not None)

    def attribute(self, name: Token) -> Field:
        if name not in ATTRIBUTES:
            raise _unknown(name)
        return Field("", str(name), name.column or 0)

    def member(self, group: Token, key: Token) -> Field:
        if group not in GROUPS:
            raise _unknown(group)
        return Field(str(group), str(key), group.column or 0)

    def quoted_member(self, group: Token, key: Token) -> Field:
        if group not in GROUPS:
            raise _unknown(group)
        return Field(str(group), _unquote(key), group.column or 0)

    def number(self, token: Token) -> float:
        return float(token)

    def text(self, token: Token) -> str:
        return _unquote(token)

    def boolean(self, token: Token) -> bool:
        return token.lower() == "true"


@cache
def _parser(start: str = "start") -> Lark:
    grammar = Path(__file__).with_suffix(".lark").read_text()
    return Lark(grammar, parser="lalr", start=start, transformer=_Conditions(), maybe_placeholders=True)


def _check_value(field: Field, value: Value) -> None:
    wants_number = field.group == "metrics" or (not field.group and field.name in NUMBERS)
    wants_text = field.group == "tags" or (not field.group and field.name in TEXTS)
    is_number = isinstance(value, float)
    if (wants_number and not is_number) or (wants_text and not isinstance(value, str)):
        wanted = "a number" if wants_number else '"text"'
        raise _bad(f"column {field.column}: {field.name} compared with {_shown(value)}", f"compare it with {wanted}")
    if not field.group and field.name in TIMES:
        time_ns(field, value)


def _unquote(token: Token) -> str:
    return _ESCAPE.sub(r"\1", token[1:-1])


def _keep_escapes(token: Token) -> str:
    """A pattern's text: a backslash before a wildcard or a backslash stays, because it means something there."""
    return _ESCAPE.sub(lambda found: found[0] if found[1] in r"%_\\" else found[1], token[1:-1])


def _shown(value: Value) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def _unknown(name: Token) -> InvalidArgument:
    known = (*GROUPS, *ATTRIBUTES)
    hint = f"use {', '.join(f'{group}.<name>' for group in GROUPS)}, {', '.join(ATTRIBUTES)}"
    return _bad(f"column {name.column}: there is no '{name}'", f"{_nearest(name, known)}{hint}")


def _explain(text: str, error: UnexpectedInput) -> InvalidArgument:
    position = len(text) if isinstance(error, UnexpectedEOF) or error.pos_in_stream is None else error.pos_in_stream
    if isinstance(error, UnexpectedToken) and error.token.type == "$END":
        position = len(text)
    found = _WORD.match(text, position)
    what = f"'{found[0] if found else text[position]}' is" if position < len(text) else "more is"
    allowed = _allowed(error)
    nearest = _nearest(found[0], allowed) if found else ""
    message = (
        f"column {position + 1}: {what} not expected"
        if position < len(text)
        else (f"column {position + 1}: the filter ends too early")
    )
    return _bad(message, f"{nearest}allowed here: {', '.join(allowed)}")


def _allowed(error: UnexpectedInput) -> list[str]:
    names: Iterable[str] = ()
    if isinstance(error, UnexpectedToken):
        names = error.accepts or error.expected
    elif isinstance(error, UnexpectedCharacters):
        names = error.allowed or ()
    described = (word for name in sorted(names) for word in _TERMINALS.get(name, ()))
    return list(dict.fromkeys(described))


def _nearest(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'? " if close else ""


def _bad(message: str, hint: str) -> InvalidArgument:
    return InvalidArgument(
        f"filter, {message}" if message.startswith("column") else message, reason="BadFilter", hint=hint
    )
