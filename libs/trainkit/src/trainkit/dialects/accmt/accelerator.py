"""`accelerator`: which process this is, and what processes tell each other."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from trainkit.dialects.accmt import decorators
from trainkit.dialects.accmt.launching import VARIABLE, checked
from trainkit.dialects.accmt.utility import IS_CPU
from trainkit.errors import InvalidSetup
from trainkit.strategies.base import chosen
from trainkit.strategies.ddp import Distributed


class Accelerator:
    """This process among all of a run. The variables `RANK`, `LOCAL_RANK` and `WORLD_SIZE` say which one it is.

    Processes meet when one of the methods needs it, and otherwise when `Trainer.fit` starts.
    """

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def process_index(self) -> int:
        """The index of this process."""
        return int(os.environ.get("RANK", "0"))

    @property
    def local_process_index(self) -> int:
        """The index of this process on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process."""
        return self.process_index == self.num_processes - 1

    @property
    def device(self) -> torch.device:
        """Where this process trains."""
        return chosen("cpu" if IS_CPU else None, self.local_process_index)

    @property
    def mixed_precision(self) -> Literal["no", "bf16", "fp16"]:
        """The number format that `TRAINKIT_STRATEGY` names."""
        named = checked(os.environ.get(VARIABLE, "auto"))[3]
        return named if named in ("bf16", "fp16") else "no"  # type: ignore[return-value]

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the first process of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201 - what a script prints

    def wait_for_everyone(self) -> None:
        """Returns when all processes have called it."""
        if self._together():
            dist.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Runs the block on the first process, then on the others."""
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    def gather(self, tensor: Any) -> Any:
        """The rows of all processes in the order of processes; numbers of rows may differ.

        Args:
            tensor: a tensor, or a list, tuple or mapping of tensors. Those without dimensions become vectors.
        """
        return tree_map_only(Tensor, self._gathered, tensor)

    def gather_for_metrics(self, input_data: Any) -> Any:
        """The same as `gather`: evaluation gives no row to two processes, so there is nothing to remove."""
        return self.gather(input_data)

    def reduce(self, tensor: Any, reduction: Literal["sum", "mean"] = "sum") -> Any:
        """The sum or mean over processes of a tensor, or of each in a list, tuple or mapping.

        Raises:
            InvalidSetup: another reduction.
        """
        if reduction not in ("sum", "mean"):
            raise InvalidSetup(f"reduction={reduction!r}: choose sum or mean")

        def reduced(each: Tensor) -> Tensor:
            total = each.detach().clone()
            if self._together():
                dist.all_reduce(total)
            return total / self.num_processes if reduction == "mean" else total

        return tree_map_only(Tensor, reduced, tensor)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The model itself; wrappers of torch for several processes and compilation are removed."""
        while (inner := getattr(model, "_orig_mod", getattr(model, "module", None))) is not None:
            model = inner
        return model

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """See `accmt.decorators.on_main_process`."""
        return decorators.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """See `accmt.decorators.on_local_main_process`."""
        return decorators.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """See `accmt.decorators.on_last_process`."""
        return decorators.on_last_process(function)

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(each for each in dir(type(self)) if not each.startswith("_"))
        raise AttributeError(f"accelerator has no {name!r}; it has {known}. Trainer.fit does the rest by itself")

    def _together(self) -> bool:
        """Whether there are other processes. Meets them."""
        if self.num_processes == 1:
            return False
        if not dist.is_initialized():
            group = Distributed()
            group.open("cpu" if IS_CPU else None)
            atexit.register(group.close)  # does nothing when a trainer closed the group before
        return True

    def _gathered(self, tensor: Tensor) -> Tensor:
        rows = tensor.detach().reshape(-1) if tensor.ndim == 0 else tensor.detach()
        if not self._together():
            return rows
        counts: list[Any] = [None] * self.num_processes
        dist.all_gather_object(counts, len(rows))
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


accelerator = Accelerator()
"""The only one."""

precision = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[accelerator.mixed_precision]
"""The number format of the computation."""


def autocast(*tensors: Tensor) -> Any:
    """The tensors in the number format of the computation: a tuple, or the tensor itself for one."""
    cast = tuple(tensor.to(precision) for tensor in tensors)
    return cast[0] if len(cast) == 1 else cast


def autocast_(*tensors: Tensor) -> None:
    """Puts the tensors into the number format of the computation, in place."""
    for tensor in tensors:
        tensor.data = tensor.data.to(precision)


def allow_tf32(flag: bool = True) -> None:
    """Says whether matrix products and convolutions on a GPU may use TF32, which is faster and less exact."""
    torch.set_float32_matmul_precision("high" if flag else "highest")
    torch.backends.cudnn.allow_tf32 = flag
