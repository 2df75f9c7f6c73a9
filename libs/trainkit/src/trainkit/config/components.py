"""A part of a run that a configuration chooses by name: `AdamW`, or `{type: AdamW, lr: 1e-3}`.

@dataclass(frozen=True, kw_only=True)
class Settings:
    optimizer: Annotated[Component, OfKind("optimizer")]
    metric: Annotated[Component, OfKind("metric")] = Component("torchmetrics.MeanSquaredError")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainkit import catalogue
from trainkit.catalogue import Argument, UnknownName, WrongArguments

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

REFUSED = "trainkit_component"
"""The type of pydantic's errors that carry problems of ours: (path, message, allowed, suggestion) for each."""


@dataclass(frozen=True, slots=True)
class Component:
    """A name in the catalogue and the arguments for its class."""

    type: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As a file has it."""
        return {"type": self.type, **self.arguments}


@dataclass(frozen=True, slots=True)
class OfKind:
    """Marks a `Component` of a kind of the catalogue's. Names and arguments are checked without importing the class."""

    kind: str

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        kind = catalogue.KINDS[self.kind]
        names = list(kind.entries)
        path = {"type": "string", "pattern": r"^[A-Za-z_]\w*(\.\w+)+$", "description": "a dotted path"}
        listed = [_object_schema(name, entry.arguments or {}) for name, entry in kind.entries.items()]
        by_path = {"type": "object", "properties": {"type": path}, "required": ["type"]}
        return {"title": kind.noun, "anyOf": [{"enum": names}, path, *listed, by_path]}

    def check(self, value: Any) -> Component:
        """The component that a configuration means.

        Raises:
            PydanticCustomError: of the type `REFUSED`, with every problem.
        """
        if isinstance(value, Component):
            value = value.to_dict()
        if isinstance(value, str):
            value = {"type": value}
        noun = catalogue.KINDS[self.kind].noun
        if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
            self._refuse([((), f"is not {noun}", "a name, or {type: NAME, ARGUMENT: VALUE}", "")])
        given = {key: each for key, each in value.items() if key != "type"}
        try:
            known = catalogue.arguments(self.kind, value["type"])
            return Component(value["type"], given if known is None else catalogue.checked(value["type"], known, given))
        except UnknownName as error:
            self._refuse([(("type",), error.problem, error.allowed, error.suggestion)])
        except WrongArguments as error:
            self._refuse([((name,), *words) for name, *words in error.problems])
        raise AssertionError("unreachable")

    def _refuse(self, problems: list[tuple[Any, ...]]) -> None:
        from pydantic_core import PydanticCustomError

        raise PydanticCustomError(REFUSED, "refused", {"problems": problems})


_JSON_TYPES: dict[str, dict[str, Any]] = {
    "number": {"type": ["number", "string", "array", "null"]},
    "count": {"type": ["integer", "null"]},
    "flag": {"type": ["boolean", "null"]},
    "pair": {"type": "array", "minItems": 2, "maxItems": 2},
    "text": {"type": "string"},
    "any": {},
}


def _object_schema(name: str, arguments: Mapping[str, Argument]) -> dict[str, Any]:
    properties = {each.name: _JSON_TYPES[each.type] for each in arguments.values()}
    return {
        "type": "object",
        "properties": {"type": {"const": name}, **properties},
        "required": ["type"],
        "additionalProperties": False,
    }
