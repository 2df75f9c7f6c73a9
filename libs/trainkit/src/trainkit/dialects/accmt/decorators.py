"""Hooks that run on one process; on the others they return None."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def _number(name: str, default: int = 0) -> int:
    return int(os.environ.get(name, default))


def _limited(function: Callable[P, R], here: Callable[[], bool]) -> Callable[P, R | None]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if here() else None

    return call


def on_main_process(function: Callable[P, R]) -> Callable[P, R | None]:
    """Only the first process of all."""
    return _limited(function, lambda: _number("RANK") == 0)


def on_local_main_process(function: Callable[P, R]) -> Callable[P, R | None]:
    """Only the first process of each machine."""
    return _limited(function, lambda: _number("LOCAL_RANK") == 0)


def on_last_process(function: Callable[P, R]) -> Callable[P, R | None]:
    """Only the last process of all."""
    return _limited(function, lambda: _number("RANK") == _number("WORLD_SIZE", 1) - 1)


def on_local_process(function: Any, local_process_index: int | None = None) -> Any:
    """Only the process with this index on each machine: `on_local_process(function, 1)`, or `@on_local_process(1)`."""
    return _one(function, local_process_index, "LOCAL_RANK")


def on_process(function: Any, process_index: int | None = None) -> Any:
    """Only the process with this index: `on_process(function, 1)`, or `@on_process(1)`."""
    return _one(function, process_index, "RANK")


def _one(function: Any, index: int | None, variable: str) -> Any:
    if isinstance(function, int) and index is None:
        wanted = function
        return lambda decorated: _limited(decorated, lambda: _number(variable) == wanted)
    if not callable(function) or index is None:
        raise TypeError(f"give a function and the index of a process, not {function!r} and {index!r}")
    return _limited(function, lambda: _number(variable) == index)
