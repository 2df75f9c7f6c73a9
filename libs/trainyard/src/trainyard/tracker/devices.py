"""Values that are still being computed on a GPU: copied to the host without waiting for them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


class OnDevice:
    """Values of one row, some of them CUDA tensors of one element.

    Their copies are queued behind the work that computes them, into pinned memory, with an event behind them; `log`
    goes on at once. torch is never imported here: whoever has such a tensor has imported it.
    """

    def __init__(self, values: list[Any]) -> None:
        """
        Raises:
            TypeError, ValueError, RuntimeError: a value is no number, or a tensor of several.
        """
        self._values: list[float] = [0.0 if _on_device(value) else float(value) for value in values]
        self._copies = [_copy(values, places) for places in _by_device(values)]

    def ready(self) -> bool:
        """Whether `result` has nothing to wait for."""
        return all(done.query() for _, _, done in self._copies)

    def result(self) -> list[float]:
        """The values, in order; waits for those that are not there yet."""
        for places, host, done in self._copies:
            done.synchronize()
            for place, value in zip(places, host.tolist(), strict=True):
                self._values[place] = value
        return self._values


def numbers(values: Iterable[Any]) -> list[float] | OnDevice:
    """What is logged, as numbers: `float()` of everything that can be had without waiting for a GPU.

    Raises:
        TypeError, ValueError, RuntimeError: a value is no number.
    """
    given = list(values)
    return OnDevice(given) if any(map(_on_device, given)) else [*map(float, given)]


def _on_device(value: Any) -> bool:
    return getattr(value, "is_cuda", False) is True


def _by_device(values: list[Any]) -> list[list[int]]:
    places: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        if _on_device(value):
            places.setdefault(value.device, []).append(place)
    return list(places.values())


def _copy(values: list[Any], places: list[int]) -> tuple[list[int], Any, Any]:
    """Queues the copy of the tensors at `places`, all of one device: (places, host memory, event behind the copy)."""
    torch = sys.modules["torch"]
    tensors = [values[place].detach().reshape(()).double() for place in places]
    host = torch.empty(len(places), dtype=torch.float64, pin_memory=True)
    host.copy_(torch.stack(tensors), non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(tensors[0].device))
    return places, host, done
