"""Small helpers."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainkit import memory
from trainkit.random import seed_everything

_UNITS = {"epoch": ("epoch", "ep"), "step": ("step", "st"), "eval": ("evaluation", "eval")}
_URL = re.compile(r"(?:https?|ftps?)://[^\s/:]+(?::\d+)?(?:[/?]\S*)?", re.IGNORECASE)
_LOCAL = ("localhost", "127.0.0.1")

_seed: int | None = None


def set_seed(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's random numbers. The order of data and a run's own numbers follow from the
    trainer's seed alone."""
    global _seed
    seed_everything(seed)
    _seed = seed


def get_seed(default: int | None = None) -> int | None:
    """The seed of the last `set_seed`, or `default` when there was none."""
    return default if _seed is None else _seed


def is_url(string: str) -> bool:
    """Whether a text names a server: an address with its protocol, or this machine."""
    return string in _LOCAL or _URL.fullmatch(string) is not None


def get_number_and_unit(string: str) -> tuple[int, str | None]:
    """`"2eps"` as `(2, "epoch")`. The number is 1 unless given; the unit is `epoch`, `step`, `eval`, or None."""
    match = re.fullmatch(r"\s*(\d*)\s*(.*?)\s*", string.lower())
    assert match is not None  # everything matches
    word = match[2].removesuffix("s")
    unit = next((unit for unit, words in _UNITS.items() if word in words), None)
    return int(match[1] or 1), unit


def combine_dicts(*dicts: Mapping[Any, Any]) -> dict[Any, Any]:
    """All entries in one dictionary; later ones win."""
    return {key: value for each in dicts for key, value in each.items()}


def divide_list(lst: Sequence[Any], parts: int) -> list[Any]:
    """So many slices, which follow each other and whose lengths differ by at most 1."""
    size, longer = divmod(len(lst), parts)
    starts = [at * size + min(at, longer) for at in range(parts + 1)]
    return [lst[start:stop] for start, stop in itertools.pairwise(starts)]


def filter_kwargs(kwargs: Mapping[str, Any], fn: Callable[..., Any]) -> dict[str, Any]:
    """The keywords that a function or class has parameters for."""
    known = inspect.signature(fn).parameters
    return {name: value for name, value in kwargs.items() if name in known}


def cleanup() -> None:
    """Collects garbage and empties the accelerator's cache."""
    memory.free()
