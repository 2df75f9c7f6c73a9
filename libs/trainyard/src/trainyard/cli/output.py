"""Answers for programs: `-o json` and `-o yaml`."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message


_CONTROL = re.compile(r"[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Format(StrEnum):
    """How an answer is written."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def for_programs(self) -> bool:
        return self in (Format.JSON, Format.YAML)


def write(value: Any, form: Format) -> None:
    """Writes messages, and lists and mappings of them, as one JSON or YAML document."""
    data = plain(value)
    if form is Format.YAML:
        from ruamel.yaml import YAML

        yaml = YAML()
        yaml.default_flow_style = False
        yaml.dump(data, sys.stdout)
    else:
        sys.stdout.write(_json(data, indent=2) + "\n")


def write_line(message: Message) -> None:
    """Writes a message as one line of JSON: for streams."""
    sys.stdout.write(_json(plain(message)) + "\n")
    sys.stdout.flush()


def _json(data: Any, indent: int | None = None) -> str:
    """JSON in which characters that control a terminal are escaped: those below U+0020 always are."""
    text = json.dumps(data, indent=indent, ensure_ascii=False)
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def plain(value: Any) -> Any:
    """Messages and dataclasses as mappings: camelCase names, integers as integers, states as lower-case words.

    Numbers that are not finite are the texts "NaN", "Infinity" and "-Infinity", as in JSON of protobuf.
    """
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if is_dataclass(value):
        return {_camel(field.name): plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "DESCRIPTOR"):
        return _message(value)
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def _message(message: Message) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.name == "resolved" and value:
            result["spec"] = _document(value)["spec"]
        else:
            result[field.json_name] = _field(field, value)
    return result


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def _document(text: str) -> Any:
    if text.startswith("{"):
        return json.loads(text)
    from ruamel.yaml import YAML

    return YAML(typ="safe").load(text)


def _field(field: Any, value: Any) -> Any:
    if field.enum_type is None:
        return plain(value)
    prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
    return field.enum_type.values_by_number[value].name.removeprefix(prefix).lower()
