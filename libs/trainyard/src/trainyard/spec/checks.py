"""How the checks of the models say what is wrong: with what is allowed and what was probably meant."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import AfterValidator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

REFUSED = "refused"
"""The type of a pydantic error that carries complaints."""

Complaint = tuple[tuple[str | int, ...], str, str, str]
"""Where below the checked value, what is wrong, what is allowed, what was probably meant."""

T = TypeVar("T")


def refuse(message: str, *, allowed: str = "", suggestion: str = "", at: tuple[str | int, ...] = ()) -> NoReturn:
    """Ends a check: the value is wrong."""
    raise _error([(at, message, allowed, suggestion)])


def refuse_all(complaints: Sequence[Complaint]) -> None:
    """Ends a check that found several mistakes; does nothing when there is none."""
    if complaints:
        raise _error(complaints)


def _error(complaints: Sequence[Complaint]) -> PydanticCustomError:
    return PydanticCustomError(REFUSED, "{text}", {"text": complaints[0][1], "complaints": complaints})


def unique(key: Callable[[Any], Hashable], *at: str) -> AfterValidator:
    """A list whose items differ in `key`; the mistake is reported at the later item, in its field `at`."""

    def check(items: tuple[T, ...]) -> tuple[T, ...]:
        first: dict[Hashable, int] = {}
        earlier = [first.setdefault(key(item), index) for index, item in enumerate(items)]
        doubled = [(index, before) for index, before in enumerate(earlier) if before != index]
        refuse_all([((index, *at), f"the same as in item {before}", "each only once", "") for index, before in doubled])
        return items

    return AfterValidator(check)


def exactly_one(*names: str) -> Callable[[T], T]:
    """A check of a model: exactly one of these fields is given."""
    words = ", ".join(map(to_camel, names))

    def check(part: T) -> T:
        given = [to_camel(name) for name in names if getattr(part, name) is not None]
        if len(given) != 1:
            refuse(f"has {' and '.join(given)}" if given else f"has none of {words}", allowed=f"exactly one of {words}")
        return part

    return check


def one_required(*names: str) -> dict[str, Any]:
    """The same in a structural schema."""
    return {"oneOf": [{"required": [to_camel(name)]} for name in names]}
