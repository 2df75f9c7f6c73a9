"""Which process this is, and parts of data for each process. Constants are read from the environment at import."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainkit.errors import InvalidSetup

IS_CPU = bool(int(os.environ.get("ACCMT_CPU", "0")))
"""Whether the variable `ACCMT_CPU=1` keeps training on the CPU."""
IS_GPU = not IS_CPU
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
MASTER_PROCESS = RANK == 0
LAST_PROCESS = RANK == WORLD_SIZE - 1


def prepare(*objs: Any, even: bool = False) -> Any:
    """This process's part of each object, by `prepare_array` or `prepare_dataframe`; what has no length stays as it is.

    Returns:
        A list, or the part itself for one object.
    """
    parts = [_prepared(each, even) for each in objs]
    return parts[0] if len(parts) == 1 else parts


def prepare_array(array: Any, even: bool = False) -> Any:
    """This process's part of a list, tuple, array or tensor. The parts of all processes follow each other.

    Args:
        array: what is divided.
        even: repeat the last element until all parts have the same length.

    Raises:
        InvalidSetup: it has no length.
    """
    if not hasattr(array, "__len__"):
        raise InvalidSetup(f"prepare_array divides what has a length, not a {type(array).__name__}")
    indices, _ = _part(len(array), even)
    if isinstance(array, list | tuple):
        return type(array)(array[index] for index in indices)
    return array[indices] if isinstance(array, np.ndarray | Tensor) else [array[index] for index in indices]


def prepare_dataframe(df: Any, even: bool = False) -> tuple[Any, int]:
    """This process's part of a DataFrame of pandas.

    Args:
        df: what is divided by rows.
        even: repeat the last row until all parts have the same length.

    Returns:
        The part, and the number of repeated rows over all processes.
    """
    indices, repeated = _part(len(df), even)
    return df.iloc[indices], repeated


def divide_into_batches(lst: Sequence[Any], batch_size: int) -> list[Any]:
    """Slices of `batch_size`; the last may be shorter."""
    return list(iterbatch(lst, batch_size))


def iterbatch(lst: Sequence[Any], batch_size: int) -> Iterator[Any]:
    """Yields what `divide_into_batches` returns."""
    for start in range(0, len(lst), batch_size):
        yield lst[start : start + batch_size]


def pad(tensor: Tensor, to: int, value: float) -> Tensor:
    """Fills the last dimension on the right up to the length `to`; a longer tensor stays as it is."""
    return nn.functional.pad(tensor, (0, max(0, to - tensor.shape[-1])), value=value)


def _prepared(given: Any, even: bool) -> Any:
    if hasattr(given, "iloc"):
        return prepare_dataframe(given, even)
    return prepare_array(given, even) if hasattr(given, "__len__") else given


def _part(length: int, even: bool) -> tuple[list[int], int]:
    """The indices of this process's part, and how many are repeated over all processes."""
    repeated = -length % WORLD_SIZE if even else 0
    size, longer = divmod(length + repeated, WORLD_SIZE)
    start = RANK * size + min(RANK, longer)
    stop = start + size + (longer > RANK)
    return [min(index, length - 1) for index in range(start, stop)], repeated
