"""Names that scripts of a library import and that its dialect does not have, each with what to use instead.

A dialect lists them in `replaced.toml` in its folder: `[modules]` and `[names]`, name to advice, and `[about]` with the
`library` and the `release` that the dialect follows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib.resources import files
from types import ModuleType
from typing import Any

_FILE = "replaced.toml"


class Replaced(ImportError):
    """A script imports a name that the dialect does not have; the message says what to use instead."""


def getter(package: str, module: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module of a dialect.

    Args:
        package: the dialect, for instance `trainkit.dialects.accmt`.
        module: the module's name in the library, for instance `accmt.tracker`.

    Raises:
        Replaced: by what it returns, for a name with a replacement.
        AttributeError: by what it returns, for any other name.
    """

    def __getattr__(name: str) -> Any:
        if not name.startswith("__") and (error := _error(package, f"{module}.{name}", name)) is not None:
            raise error
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


def refuse_module(package: str, module: str) -> None:
    """Raises `Replaced` for a module with a replacement."""
    if (error := _error(package, module, "")) is not None:
        raise error


def guard(package: str, module: str, loaded: ModuleType) -> None:
    """Gives a loaded module of a dialect the `__getattr__` of `getter`, unless it has its own."""
    if not hasattr(loaded, "__getattr__"):
        loaded.__getattr__ = getter(package, module)  # type: ignore[method-assign]


def _error(package: str, path: str, name: str) -> Replaced | None:
    table = tomllib.loads(files(package).joinpath(_FILE).read_text("utf-8"))
    advice = table["modules"].get(path) or (table["names"].get(name) if name else None)
    if advice is None:
        return None
    about = table["about"]
    return Replaced(
        f"{path} is not in {about['library']} {about['release']} as this dialect has it: {advice}", name=path
    )
