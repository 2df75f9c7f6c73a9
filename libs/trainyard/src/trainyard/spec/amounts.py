"""The fields that hold an amount: CPU, memory, a length of time. They keep what the document wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from trainyard.spec import quantities
from trainyard.spec.checks import refuse
from trainyard.spec.quantities import QuantityError


def _between(
    parse: Callable[[object], float], least: float, most: float, words: str, meant: Callable[[Any], str] = lambda _: ""
) -> PlainValidator:
    def check(value: Any) -> Any:
        try:
            amount = parse(value)
        except QuantityError as error:
            refuse(str(error), allowed=error.allowed, suggestion=error.suggestion)
        if amount < least:
            refuse("too little", allowed=words, suggestion=meant(value))
        if amount > most:
            refuse("too much", allowed=words)
        return value

    return PlainValidator(check)


def _int_or_string(pattern: str) -> WithJsonSchema:
    # The one union that a structural schema knows.
    union = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
    return WithJsonSchema({**union, "pattern": pattern, "maxLength": quantities.LONGEST})


def _gibibytes(value: Any) -> str:
    """Who writes `memory: 2` does not mean two bytes."""
    return f"{value}Gi" if isinstance(value, int) and 0 < value <= 4096 else ""


_TEXT = WithJsonSchema({"type": "string", "pattern": quantities.DURATION_PATTERN, "maxLength": quantities.LONGEST})
_DAY = 86400.0

Cpu = Annotated[
    int | str,
    _between(quantities.cpu_cores, 0.001, 4096, "1m to 4096 cores"),
    _int_or_string(quantities.CPU_PATTERN),
]
Memory = Annotated[
    int | str,
    _between(quantities.memory_bytes, 2**20, 2**50, '"1Mi" to "1Pi"', _gibibytes),
    _int_or_string(quantities.MEMORY_PATTERN),
]
Duration = Annotated[str, _between(quantities.seconds, 0.001, 365 * _DAY, "1ms to 365d"), _TEXT]
Grace = Annotated[str, _between(quantities.seconds, 0.001, _DAY, "1ms to 1d"), _TEXT]
Backoff = Annotated[str, _between(quantities.seconds, 0, 300, "0s to 5m; waits double from it, up to 5m"), _TEXT]
