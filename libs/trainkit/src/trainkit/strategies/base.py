"""The base of strategies: one process on its own. The others override what several processes change.

The order of calls in a run: `open`, `prepare`, `make_optimizer`, then for every step `forward` and `backward`, for
every update `clip` and `step`; `settle` before weights are read (evaluation, checkpoint); `close`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.errors import InvalidSetup
from trainkit.precision import Precision

if TYPE_CHECKING:
    from trainkit.initial.values import Initial
    from trainkit.trainer import OptimizerFactory


class TrainingStep(nn.Module):
    """Makes `training_step` the forward of a module, so that wrappers see the whole step."""

    PREFIX: ClassVar[str] = "module."
    """What the names of the user's parameters begin with in here."""

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.module = module
        self._precision = precision

    def forward(self, batch: Any, evaluate: bool = False) -> Any:
        step: Any = evaluation_step(self.module) if evaluate else self.module.training_step
        if not self._precision.autocasts:
            return step(batch)
        with self._precision.autocast():
            return step(batch)


def evaluation_step(module: nn.Module) -> Any:
    """The module's `evaluation_step`, or its `training_step` when it has none."""
    return getattr(module, "evaluation_step", None) or module.training_step


class Strategy:
    """One process. Attributes are set by `open` and `prepare`.

    Attributes:
        rank, world_size: this process and how many there are.
        device: where the module and batches are.
        module: the user's module, without wrappers.
        forward: runs `training_step` on a batch.
        evaluate: runs `evaluation_step` on a batch.
    """

    name: ClassVar[str] = "single"
    stores_window: ClassVar[bool] = True
    """Whether gradients of an unfinished accumulation window can be stored."""

    resizable = True
    """Whether another number of processes can go on from a checkpoint."""
    holds_weights = True
    """Whether the module's parameters can be read between steps: whole, or as DTensors."""
    holds_gradients = True
    """Whether parameters have their gradients when a window is complete."""

    updates_copies = False
    """Whether updates are made to copies of the module's weights, so that a write to these needs `weights_changed`."""

    works_alone = True
    """Whether a step can do without the other processes; see `alone`."""

    group_names: list[list[str]] | None = None
    """The names of the parameters in each of the optimizer's groups, where the optimizer updates pieces instead."""

    shards_parameters = False
    """Whether a process keeps a part of each parameter, so that a module need not fit into its memory."""

    initial: Initial | None = None
    """What gives the module its initial values in `prepare`, when it does not have them; see `placed`."""

    rank = 0
    local_rank = 0
    world_size = 1
    device = torch.device("cpu")
    module: nn.Module
    forward: Callable[[Any], Any]
    evaluate: Callable[[Any], Any]
    precision: Precision
    _optimizer: Optimizer

    @property
    def is_main(self) -> bool:
        """Whether this is the first process."""
        return self.rank == 0

    def open(self, device: torch.device | str | None) -> None:
        """Meets the other processes and chooses the device."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InvalidSetup(f"strategy='single' in one of {os.environ['WORLD_SIZE']} processes: use 'ddp' or 'fsdp'")
        self.device = chosen(device, 0)

    def prepare(self, module: nn.Module, precision: Precision) -> None:
        """Puts the module on the device and wraps it."""
        self.module, self.precision = self.placed(module), precision
        step = TrainingStep(self.module, precision)
        # Without autocast there is nothing to wrap, and a wrapper costs a microsecond.
        self.forward = step if precision.autocasts else self.module.training_step  # type: ignore[assignment]
        self.evaluate = partial(step, evaluate=True)

    def placed(self, module: nn.Module) -> nn.Module:
        """The module, whole, on the device and with its initial values."""
        if self.initial is not None:
            self.initial.fill(module, self.device)
        return module.to(self.device)

    def make_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        """The optimizer over the trainable parameters."""
        self._optimizer = factory([(name, p) for name, p in self.module.named_parameters() if p.requires_grad])
        return self._optimizer

    def accumulating(self) -> AbstractContextManager[Any]:
        """Within it, gradients stay on this process: more of the same window will follow."""
        return nullcontext()

    def alone(self, batch: Any) -> Any:
        """`training_step` without any communication, also not in the backward pass; `synchronise` makes up for it.

        Raises:
            InvalidSetup: a step of this strategy cannot do without.
        """
        return self.forward(batch)

    def synchronise(self) -> None:
        """Averages the gradients over all processes."""

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Adds the gradients of `loss`; `options` are those of torch's `backward`."""
        self.precision.backward(loss, options)

    def step(self, optimizer: Optimizer) -> bool:
        """Updates the weights. False when the update was left out because of the loss scale."""
        if self.precision.scaler is not None:
            return self.precision.step(optimizer)
        optimizer.step()
        return True

    def clear(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        """Forgets the gradients; False: makes them zeros."""
        if not set_to_none or getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
            optimizer.zero_grad(set_to_none)
            return
        # As torch's own does it, which also makes a record for the profiler: that takes 4 microseconds.
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None

    def gradients(self) -> list[Tensor]:
        """The gradients of an update that are there, local shards where sharded."""
        return [p.grad for p in self._updated() if p.grad is not None]

    def _updated(self) -> Iterator[Tensor]:
        """What the optimizer updates. Nothing clears the gradients of other parameters, so they must not count."""
        return (p for group in self._optimizer.param_groups for p in group["params"])

    def partial_gradients(self) -> dict[str, Tensor]:
        """This process's gradients of an unfinished window, whole, by the names of their parameters. All processes
        have to ask. Only where `stores_window`."""
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    def put_partial_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Takes over what `partial_gradients` returned: this process goes on within the window."""
        for name, p in self.module.named_parameters():
            if name in gradients:
                p.grad = torch.empty_like(p).copy_(gradients[name])

    def clip(self, max_norm: float | None) -> Tensor:
        """Shrinks the gradients so that their norm over all parameters is at most `max_norm`.

        Returns:
            The norm before that, a scalar.
        """
        norm = torch.nn.utils.get_total_norm(self.gradients())
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._updated(), max_norm, norm)
        return norm

    def sum(self, values: Tensor) -> Tensor:
        """`values` added over all processes, in place."""
        return values

    def gather(self, value: Any) -> list[Any]:
        """A small plain value of every process, by rank."""
        return [value]

    def counts(self, value: int) -> list[int]:
        """A whole number of every process, by rank. It is exchanged on the host, without waiting for the device."""
        return [value]

    def barrier(self) -> None:
        """Waits for all processes."""

    def settle(self) -> None:
        """Makes what every process keeps for itself (running statistics) the same everywhere."""

    def weights(self) -> dict[str, Tensor]:
        """Parameters and stored buffers by name; sharded ones are DTensors."""
        return {name: value for name, value in self.module.state_dict().items() if isinstance(value, Tensor)}

    def extra_state(self) -> dict[str, Any]:
        """What submodules add to the module's state that is no tensor, by name: see torch's `get_extra_state`."""
        return {name: value for name, value in self.module.state_dict().items() if not isinstance(value, Tensor)}

    def put_weights(self, weights: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
        """Takes over what was read from a checkpoint into the tensors of `weights`, and what `extra_state` returned.

        The tensors are the live ones, unless the module gives others for them: by a hook, or as extra state.
        """
        self._load_copies(weights, extra)
        self.weights_changed()

    def _load_copies(self, weights: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
        live = {id(each) for each in chain(self.module.parameters(), self.module.buffers())}
        if extra or any(id(weight) not in live for weight in self.module.state_dict(keep_vars=True).values()):
            self.module.load_state_dict({**weights, **extra}, strict=False)

    @contextmanager
    def writing_weights(self) -> Iterator[dict[str, nn.Parameter]]:
        """Within it, parameters may be written in place, between two steps; `weights_changed` is called at its end.

        All processes enter it, and each writes what it holds: the whole parameter, or its shard of a DTensor.

        Yields:
            The live parameters by name.
        """
        self.reshard()
        try:
            with torch.no_grad():
                yield dict(self.module.named_parameters())
        finally:
            self.weights_changed()

    def weights_changed(self) -> None:
        """Notification: parameters were written in place, by something else than an update. Updates the copies that
        the strategy holds of them. All processes call it; `writing_weights` does so by itself."""

    def trained_changed(self) -> None:
        """Notification: parameters were frozen or unfrozen, as their `requires_grad` says. All processes call it,
        between two accumulation windows.

        Raises:
            InvalidSetup: the strategy trains what it began with.
        """

    def reshard(self) -> None:
        """Frees the whole parameters that a forward pass gathered and kept, so that `module` has the shards again."""

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """What this process alone holds of the optimizer's state, beside that of the module's parameters."""
        return {}

    def load_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned on the same process out of as many."""

    def accepts(self, state: Mapping[str, Any]) -> bool:
        """Whether `load_state_dict` can take over this as it is. Else its pieces are put together first."""
        return not state.get("pieces")

    def layout(self) -> list[dict[str, Any]]:
        """What the pieces are that the optimizer updates on this process instead of parameters: of each its `size` in
        elements, and its `parts`, [parameter's name, first element of it, first element of the piece, elements]."""
        return []

    def close(self) -> None:
        """Leaves the other processes."""

    def describe(self) -> Mapping[str, Any]:
        """Plain settings, for trackers."""
        return {"name": self.name, "world_size": self.world_size, "device": str(self.device)}


def chosen(device: torch.device | str | None, local_rank: int) -> torch.device:
    """The device that was asked for, else this process's accelerator, else the CPU.

    Raises:
        InvalidSetup: it is no device, or this machine does not have it.
    """
    if device is not None:
        return _asked(device)
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.device(kind.type, local_rank % torch.accelerator.device_count())
    return torch.device("cpu")


def _asked(device: object) -> torch.device:
    allowed = "give for instance 'cpu', 'cuda' or 'cuda:1', or None"
    if not isinstance(device, str | torch.device):
        raise InvalidSetup(f"device={device!r} is of the type {type(device).__name__}: {allowed}")
    try:
        asked = torch.device(device)
    except RuntimeError:
        raise InvalidSetup(f"device={device!r}: {allowed}") from None
    try:
        torch.empty(1, device=asked).tolist()  # also finds the device 'meta', which computes nothing
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidSetup(f"device={str(device)!r} is not available on this machine: {reason}; {allowed}") from None
    return asked
