"""Splits nested state into tensors by name and plain values for JSON, and puts both together again.

A tensor's name is the way to it, `/callbacks/EMA/averages/weight`; a `/` within a key is written `~1` and a `~` as
`~0`, so that no two ways have one name. Its place in the values is held by `{"$tensor": name}`. Tuples, and mappings
with other keys than text, are marked the same way, so that what comes back equals what went in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from trainkit.errors import CheckpointError


def split(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The plain part of `tree`; its tensors are added to `tensors` under names that begin with `name`.

    Raises:
        CheckpointError: something in it is neither a tensor nor plain.
    """
    if isinstance(tree, Tensor):
        tensors[name] = tree
        return {"$tensor": name}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, np.generic):
        return tree.item()
    if isinstance(tree, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in tree):
            return {key: split(value, f"{name}/{escaped(key)}", tensors) for key, value in tree.items()}
        pairs = [[key, split(value, f"{name}/{at}", tensors)] for at, (key, value) in enumerate(tree.items())]
        return {"$map": pairs}
    if isinstance(tree, (list, tuple)):
        items = [split(value, f"{name}/{index}", tensors) for index, value in enumerate(tree)]
        return {"$tuple": items} if isinstance(tree, tuple) else items
    raise CheckpointError(
        f"{name} holds a {type(tree).__name__}: state may consist of tensors, numbers, text, truth values, None, "
        "lists, tuples and mappings of these"
    )


def escaped(key: str) -> str:
    """A key as a part of a name."""
    return key.replace("~", "~0").replace("/", "~1")


def unescaped(part: str) -> str:
    """The key that `escaped` made a part of a name."""
    return part.replace("~1", "/").replace("~0", "~")


def join(values: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that `split` took apart."""
    if isinstance(values, list):
        return [join(value, tensors) for value in values]
    if not isinstance(values, dict):
        return values
    if "$tensor" in values:
        return tensors[values["$tensor"]]
    if "$tuple" in values:
        return tuple(join(value, tensors) for value in values["$tuple"])
    if "$map" in values:
        return {key: join(value, tensors) for key, value in values["$map"]}
    return {key: join(value, tensors) for key, value in values.items()}


def names(values: Any) -> list[str]:
    """The names of all tensors that `values` speaks of."""
    if isinstance(values, list):
        return [name for value in values for name in names(value)]
    if not isinstance(values, dict):
        return []
    if "$tensor" in values:
        return [values["$tensor"]]
    return [name for value in values.values() for name in names(value)]
