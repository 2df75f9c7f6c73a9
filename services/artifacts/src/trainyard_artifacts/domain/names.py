"""Names of things, and references to versions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from servicekit.errors import InvalidArgument

LATEST = "latest"
BEST = "best"
KINDS = ("code", "checkpoint", "output", "data")

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_ALIAS = re.compile(r"[a-z][a-z0-9._-]{0,63}")
_NUMBER = re.compile(r"v?([0-9]{1,9})")
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class ById:
    id: str


@dataclass(frozen=True, slots=True)
class ByNumber:
    name: str
    number: int


@dataclass(frozen=True, slots=True)
class ByAlias:
    name: str
    alias: str


Reference = ById | ByNumber | ByAlias


def parse_reference(text: str) -> Reference:
    """What "name", "name@alias", "name@3", "name@v3" or a version id refers to.

    Raises:
        InvalidArgument: it is none of them.
    """
    if _ID.fullmatch(text):
        return ById(text)
    name, separator, selector = text.partition("@")
    if not _NAME.fullmatch(name) or (separator and not selector):
        raise InvalidArgument(
            f"'{text}' does not refer to a version",
            reason="BadReference",
            hint="write name, name@alias, name@3, or a version id",
        )
    if number := _NUMBER.fullmatch(selector):
        return ByNumber(name, int(number[1]))
    return ByAlias(name, check_alias(selector) if separator else LATEST)


def is_id(text: str) -> bool:
    """Whether this can be an id: a UUIDv7 in text form."""
    return _ID.fullmatch(text) is not None


def check_name(name: str) -> str:
    """Raises InvalidArgument unless `name` can name an artifact."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"'{name}' cannot name an artifact",
            reason="BadName",
            hint="use 1 to 128 of a-z, 0-9, '.', '_' and '-', and begin with a letter or digit",
        )
    return name


def check_alias(alias: str) -> str:
    """Raises InvalidArgument unless `alias` can be one (and is not a number)."""
    if not _ALIAS.fullmatch(alias) or _NUMBER.fullmatch(alias):
        raise InvalidArgument(
            f"'{alias}' cannot be an alias",
            reason="BadAlias",
            hint="use 1 to 64 of a-z, 0-9, '.', '_' and '-', begin with a letter, and do not look like a number (v3)",
        )
    return alias


def check_not_best(alias: str, best_metric: str) -> None:
    """Raises InvalidArgument when a user would move "best" on a checkpoint whose job names a metric for it."""
    if alias == BEST and best_metric:
        raise InvalidArgument(
            f"'{BEST}' follows the metric '{best_metric}' of this job's checkpoints",
            reason="BadAlias",
            hint="choose another alias",
        )


def check_kind(kind: str) -> str:
    """Raises InvalidArgument unless `kind` is one of the kinds."""
    if kind not in KINDS:
        raise InvalidArgument(f"'{kind}' is not a kind of artifact", reason="BadKind", hint=f"use {', '.join(KINDS)}")
    return kind
